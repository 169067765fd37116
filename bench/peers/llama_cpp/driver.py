"""llama.cpp, through the llama-cpp-python package: plain, with its own prompt lookup, or many sequences in one batch."""

from importlib.metadata import version

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from bench.peers.llama_cpp.batch import Batches
from bench.peers.protocol import AnswerMany, Reply, Settings, alone, serve, timed_stream


def open_model(settings: Settings) -> AnswerMany:
    if settings.variant == "batch":
        return Batches(settings).answer
    draft = None
    if settings.variant == "lookup":
        draft = LlamaPromptLookupDecoding(num_pred_tokens=settings.lookup_tokens)
    model = Llama(
        settings.model,
        n_ctx=settings.max_context,
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
        flash_attn=True,  # llama.cpp's own default where the device can, which a CPU can
        draft_model=draft,
        logits_all=draft is not None,  # drafts are verified against the logits of every row
        verbose=False,
    )

    def answer(prompt_token_ids: list[int], max_tokens: int) -> Reply:
        model.reset()  # it would otherwise keep a prompt that it has seen before
        return timed_stream(lambda: model.generate(prompt_token_ids, temp=0.0), max_tokens)

    return alone(answer)


if __name__ == "__main__":
    serve(lambda: f"llama-cpp-python {version('llama-cpp-python')}", open_model)
