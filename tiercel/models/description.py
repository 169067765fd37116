"""What a model is made of, as data. One decoder and one MTP layer read these; no model has a file of its own."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Sizes and conventions of one decoder (Llama family: RoPE, GQA, RMSNorm, SwiGLU).

    Args:
        family: ``model_type`` of the checkpoint, e.g. ``llama``.
        vocab_size: rows of the embedding and of the head.
        hidden_size: width of the residual stream.
        intermediate_size: inner width of the MLP.
        num_layers: decoder layers of the target.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides ``num_heads``.
        head_dim: width of one head.
        rope_theta: RoPE base. Rotation is by halves (Hugging Face's layout), in float32.
        rms_norm_eps: epsilon of every RMSNorm.
        max_position: context length in tokens.
        tie_word_embeddings: whether the head is the embedding.
        eos_token_ids: tokens that end an answer.
        attention_bias: whether q, k and v have a bias.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    attention_bias: bool = False


@dataclass(frozen=True, slots=True)
class MtpDescription:
    """Sizes and conventions of a model's MTP layers; each layer's body is one decoder layer of ``body``.

    Args:
        num_layers: MTP layers held by the checkpoint.
        chained: layer i > 0 gets layer i-1's output (True) or again the target's hidden state (False).
        body: the decoder layer inside each MTP layer (``num_layers`` of it is not used).
        target_hidden_size: width of the target's hidden state.
        hidden_before_final_norm: the target's hidden state is taken before (True) or after its final norm.
        embedding_first: ``eh_proj`` reads ``[embedding; hidden]`` (True) or the reverse.
        draft_vocab_size: tokens that the draft can propose; equal to the target's vocabulary if there is no ``d2t``.
        target_fingerprint: ``fingerprint`` of the target it was trained for (empty: unknown).
    """

    num_layers: int
    chained: bool
    body: ModelDescription
    target_hidden_size: int
    hidden_before_final_norm: bool
    embedding_first: bool
    draft_vocab_size: int
    target_fingerprint: str = ""
