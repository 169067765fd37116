"""What a sampled row can draw: temperature, and tokens cut off by rank or probability."""

import math

from torch import Tensor

from tiercel.core.sampling_params import SamplingParams


def filtered_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Temperature, top-k, top-p, min-p, typical-p (the order of Hugging Face ``generate``): float32 ``[vocab]``, -inf where cut.

    Top-p keeps the smallest set of most likely tokens whose mass reaches ``top_p``; ties at the top-k border all stay.
    """
    scaled = logits / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(params.top_k).values[-1], -math.inf)
    if params.top_p < 1:
        ordered, order = scaled.sort(descending=True, stable=True)
        mass = ordered.softmax(-1)
        beyond = mass.cumsum(-1) - mass >= params.top_p
        beyond[0] = False  # however small top_p is, the likeliest token stays (float32 rounds 1e-46 to 0)
        scaled = scaled.index_fill(0, order[beyond], -math.inf)
    if params.min_p > 0:
        shares = scaled.softmax(-1)
        scaled = scaled.masked_fill(shares < params.min_p * shares.max(), -math.inf)
    if params.typical_p < 1:
        scaled = _typical(scaled, params.typical_p)
    return scaled


def _typical(scaled: Tensor, mass: float) -> Tensor:
    """Keep the tokens whose surprise is closest to the expected one, up to ``mass`` (Meister et al., 2023)."""
    logs = scaled.log_softmax(-1)
    shares = logs.exp()
    expected = -(logs * shares).nansum()  # 0 times -inf where a token is cut already
    distance = (-logs - expected).abs()
    ordered, order = distance.sort(stable=True)
    last = int((shares[order].cumsum(-1) < mass).sum().clamp(max=len(scaled) - 1))
    return scaled.masked_fill(distance > ordered[last], -math.inf)
