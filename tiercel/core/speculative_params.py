"""What one request wants of speculation."""

from dataclasses import dataclass

from tiercel.core.errors import UserError


@dataclass(frozen=True, slots=True)
class SpeculativeParams:
    """Per-request speculation; output does not depend on it, only its speed.

    Args:
        enabled: False decodes this request plainly.
        num_steps: drafts per round at most, whoever proposes them (in a tree: positions); None: as many as the engine chooses.

    Raises:
        UserError: a value has the wrong type or is below 0.
    """

    enabled: bool = True
    num_steps: int | None = None

    def __post_init__(self) -> None:
        if type(self.enabled) is not bool:
            raise UserError(f"speculative.enabled={self.enabled!r} is not allowed: give true or false")
        if self.num_steps is not None and (type(self.num_steps) is not int or self.num_steps < 0):
            raise UserError(
                f"speculative.num_steps={self.num_steps!r} is not allowed: give an integer of at least 0, or null"
            )

    @property
    def most_drafts(self) -> int | None:
        """Drafts per round at most; None sets no limit."""
        return self.num_steps if self.enabled else 0


AS_THE_ENGINE_DOES = SpeculativeParams()
"""Nothing was asked for."""
