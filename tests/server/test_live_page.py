"""The live page, in a real Chromium: what people see is what the API answers."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from openai import OpenAI
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.server.conftest import LiveServer, start
from tiercel.server.live import FILES, FOLDER

BROWSER, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1300,1000")
QUESTION, NUM_TOKENS = "hi", 40


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    if not (BROWSER.exists() and DRIVER.exists()):
        pytest.skip(
            f"THE LIVE PAGE IS NOT TESTED: {BROWSER} and {DRIVER} are needed (Debian: chromium, chromium-driver)"
        )
    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(str(DRIVER)))
    yield driver
    driver.quit()


@pytest.fixture
def page(driver: Chrome, live: LiveServer) -> Iterator["Page"]:
    page = Page(driver, live.url)
    yield page
    assert driver.get_log("browser") == []  # no error, nothing that the policy forbids
    driver.get("about:blank")


class Page:
    """The page as a person uses it."""

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver = driver
        driver.get(url)
        self.wait(lambda: "alive" in self.by_id("state").text)

    def by_id(self, name: str) -> WebElement:
        return self.driver.find_element(By.ID, name)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def wait(self, until: Callable[[], object]) -> None:
        WebDriverWait(self.driver, 20, 0.05).until(lambda _: until())

    def type(self, name: str, value: object) -> None:
        self.by_id(name).clear()
        self.by_id(name).send_keys(str(value))

    def ask(self, question: str, tokens: int) -> None:
        """Send a message with the keyboard and wait for the whole answer."""
        self.type("max-tokens", tokens)
        self.by_id("prompt").send_keys(question, Keys.ENTER)
        self.wait_for_answer()

    def wait_for_answer(self) -> None:
        ends = ("length", "stop")
        self.wait(lambda: self.by_id("send").is_enabled() and self.all("#conversation .soft")[-1].text.endswith(ends))

    def tokens(self, css: str) -> list[tuple[str, int]]:
        """Who proposed a token, and its id."""
        titles = [span.get_attribute("title") or "" for span in self.all(css)]
        found = [re.match(r"([\w ]+)(?:, rejected)?, id (\d+)", title) for title in titles]
        return [(match[1], int(match[2])) for match in found if match]


def test_tokens_and_rejected_drafts_are_those_of_the_answer(page: Page, client: OpenAI, http: httpx2.Client) -> None:
    page.ask(QUESTION, NUM_TOKENS)
    answer = client.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=NUM_TOKENS,
        temperature=0,
    )
    spec = answer.to_dict()["metrics"]["speculative_decoding"]  # type: ignore[index]
    assert answer.usage is not None
    delivered = page.tokens(".answer span:not(.wrong)")
    assert len(delivered) == answer.usage.completion_tokens > 5
    ids = {"tokens": [token for _, token in delivered]}
    assert http.post("/detokenize", json=ids).json()["prompt"] == answer.choices[0].message.content
    sources = [source for source, _ in delivered]
    assert sources[0] == "prefill"
    assert set(sources[1:]) <= {"bonus token", "prompt lookup", "MTP layer 1", "MTP layer 2"}
    proposed, accepted = spec["num_draft_tokens"], spec["num_accepted_draft_tokens"]  # type: ignore[index]
    wrong = page.all(".answer .wrong")
    assert len(wrong) == proposed - accepted > 0
    assert not any(span.is_displayed() for span in wrong)
    page.by_id("show-rejected").send_keys(Keys.SPACE)
    page.wait(lambda: all(span.is_displayed() for span in wrong))
    assert f"{accepted} of {proposed} drafts" in page.by_id("positions-of").text
    length = spec["mean_acceptance_length"]  # type: ignore[index]
    assert f"acceptance length {length:.2f}" in page.all("#conversation .soft")[-1].text


def test_once_more_and_a_new_chat(page: Page) -> None:
    page.ask(QUESTION, 8)
    page.by_id("again").click()
    page.wait(lambda: len(page.all(".answer")) == 2)
    page.wait_for_answer()
    first, second = page.all(".answer")
    assert first.text == second.text != ""
    assert len(page.all(".said")) == 1
    page.by_id("clear").click()
    assert page.all("#conversation *") == []


def test_the_slider_and_the_switch_act_on_the_next_answer(page: Page) -> None:
    page.by_id("show-rejected").send_keys(Keys.SPACE)
    page.by_id("num-steps").send_keys(Keys.HOME)
    page.ask(QUESTION, NUM_TOKENS)
    page.by_id("speculate").send_keys(Keys.SPACE)
    page.by_id("again").click()
    page.wait(lambda: len(page.all(".answer")) == 2)
    page.wait_for_answer()
    shallow, plain = page.all(".answer")
    drafted = [{source for source, _ in page.tokens(f".answer:nth-of-type({place}) span")} for place in (2, 4)]
    assert "MTP layer 1" in drafted[0]
    assert "MTP layer 2" not in drafted[0]
    assert drafted[1] <= {"prefill", "bonus token"}
    said = [line.text for line in page.all("#conversation .soft")]
    assert said[0].startswith("K = 1 ·")
    assert said[1].startswith("no speculation ·")
    assert len(page.all(".answer:nth-of-type(4) span")) > 5
    assert shallow.get_attribute("textContent") != plain.get_attribute("textContent")  # rejected drafts, in the one


def test_a_stopped_answer_is_aborted(page: Page) -> None:
    page.type("max-tokens", 480)
    page.type("temperature", 2)

    def is_stopped(after_ms: int) -> bool:
        # Stopped from inside the page: the toy has ended before a driver's click arrives.
        page.driver.execute_script("setTimeout(() => document.getElementById('stop').click(), arguments[0])", after_ms)
        page.driver.execute_script("document.getElementById('ask').requestSubmit()")
        page.wait(lambda: page.by_id("send").is_enabled())
        time.sleep(0.5)  # what was on its way has been drawn
        return page.by_id("watched-about").text.startswith("abort")

    for after_ms in range(20, 320, 20):  # too early it is not with the engine yet, too late it has ended
        page.type("prompt", "go on")
        if is_stopped(after_ms):
            return
    pytest.fail("no answer was aborted")


def test_requests_of_others_show_too(page: Page, client: OpenAI) -> None:
    page.ask(QUESTION, 4)
    client.completions.create(
        model="toy",
        prompt=[7, 8, 9],
        max_tokens=9,
        temperature=0,
        extra_headers={"X-Request-Id": "another"},
        extra_body={"ignore_eos": True},
    )
    page.wait(lambda: "cmpl-another" in page.by_id("requests").text and "9 tokens" in page.all("#requests li")[0].text)
    page.all("#requests button")[0].send_keys(Keys.ENTER)
    page.wait(lambda: page.by_id("watched-title").text == "cmpl-another")
    page.wait(lambda: len(page.tokens("#watched-tokens span:not(.wrong)")) == 9)


def test_what_the_server_refuses_is_told(page: Page) -> None:
    page.by_id("prompt").send_keys("x" * 600, Keys.ENTER)
    page.wait(lambda: page.all(".failed"))
    assert "shorten the prompt" in page.all(".failed")[0].text
    assert [entry["message"] for entry in page.driver.get_log("browser") if "400" not in entry["message"]] == []


def test_a_phone_and_a_dark_room(page: Page) -> None:
    light = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    try:
        page.ask("a" * 90, 30)
        root = "document.documentElement"
        assert page.driver.execute_script(f"return {root}.scrollWidth <= innerWidth && innerWidth === 360")
        assert page.driver.execute_script("return getComputedStyle(document.body).backgroundColor") != light
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_page_asks_for_the_key(driver: Chrome, toy_options: list[str]) -> None:
    server = start(*toy_options, "--api-key", "sesame", "--no-events")
    try:
        driver.get(server.url)
        WebDriverWait(driver, 20).until(lambda d: d.find_element(By.ID, "api-key").is_displayed())
        driver.find_element(By.ID, "api-key").send_keys("sesame", Keys.ENTER)
        WebDriverWait(driver, 20).until(lambda d: "--events" in d.find_element(By.ID, "notice").text)
        driver.find_element(By.ID, "prompt").send_keys("hi", Keys.ENTER)
        WebDriverWait(driver, 20).until(lambda d: d.find_element(By.CSS_SELECTOR, ".answer").text)
        driver.get("about:blank")
        driver.get_log("browser")  # the 401 and the 403 that were expected
    finally:
        server.end()


def test_the_page_is_self_contained(http: httpx2.Client) -> None:
    index = http.get("/")
    assert index.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in index.headers["content-security-policy"]
    linked = re.findall(r'(?:src|href)="([^"]+)"', index.text)
    assert len(linked) > 3
    for path in linked:
        assert http.get(f"/{path}").status_code == 200
    for path in FOLDER.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text, path.name
        for forbidden in ("eval(", "innerHTML", "style=", "onclick="):
            assert forbidden not in text, path.name
        for name in re.findall(r'from "\./(\w+\.js)"', text):
            assert name in FILES
    tag = index.headers["etag"]
    assert http.get("/", headers={"If-None-Match": tag}).status_code == 304
    assert http.get("/page/nothing.js").status_code == 404
    assert http.get("/page/..%2Flive.py").status_code == 404
