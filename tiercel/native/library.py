"""Finding and binding the CPU library (``csrc/tiercel.h`` describes every structure and function)."""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

PATH = Path(__file__).parent / "libtiercel.so"
CODE_PATHS = ("avx512vnni", "avx2", "portable")


class Shape(Structure):
    """``tc_shape``."""

    _fields_ = (
        *((name, c_int64) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "target_hidden")),
        ("rope_theta", c_double),
        ("eps", c_double),
        ("embedding_first", c_int32),
    )


class Layer(Structure):
    """``tc_layer``."""

    _fields_ = tuple(
        (name, c_void_p) for name in ("attn_norm", "mlp_norm", "qkv_bias", "qkv", "out", "gate_up", "down")
    )


class Step(Structure):
    """``tc_step``."""

    _fields_ = (
        ("rows", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("target_hidden", c_void_p),
        ("segments", c_int64),
        ("segment_rows", c_void_p),
        ("slots", c_void_p),
        ("bases", c_void_p),
        ("tails", c_void_p),
        ("tail_width", c_int64),
        ("pool", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kv_is_half", c_int32),
        ("hidden", c_void_p),
        ("num_taps", c_int64),
        ("taps", c_void_p),
        ("tapped", c_void_p),
        ("wanted", c_int64),
        ("wanted_rows", c_void_p),
        ("logits", c_void_p),
        ("best", c_void_p),
        ("confidence", c_void_p),
    )


class Chain(Structure):
    """``tc_chain``."""

    _fields_ = (
        ("depth", c_int64),
        ("layers", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("is_chained", c_int32),
        ("token_ids", c_void_p),
        ("known", c_void_p),
        ("target_ids", c_void_p),
        ("drafts", c_void_p),
        ("confidence", c_void_p),
        ("end_ns", c_void_p),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where installing the package built none (no C++ compiler)."""
    if not PATH.is_file():
        return None
    found = ctypes.CDLL(str(PATH))
    for name, result, arguments in (
        ("tc_read", c_uint64, (c_void_p, c_int64)),
        ("tc_isa", c_char_p, ()),
        ("tc_set_isa", c_int, (c_char_p,)),
        ("tc_set_threads", None, (c_int,)),
        ("tc_matrix_new", c_void_p, (c_int, c_int64, c_int64, c_void_p)),
        ("tc_matrix_free", None, (c_void_p,)),
        ("tc_matrix_bytes", c_int64, (c_void_p,)),
        ("tc_matrix_row", None, (c_void_p, c_int64, c_void_p)),
        ("tc_matrix_apply", None, (c_void_p, c_int, c_void_p, c_int64, c_void_p)),
        ("tc_model_new", c_void_p, (POINTER(Shape), c_int, c_void_p)),
        ("tc_model_free", None, (c_void_p,)),
        ("tc_model_add_layer", None, (c_void_p, POINTER(Layer))),
        ("tc_model_set_combine", None, (c_void_p, c_void_p, c_void_p, c_void_p)),
        ("tc_model_set_head", None, (c_void_p, c_void_p, c_void_p)),
        ("tc_model_run", None, (c_void_p, POINTER(Step))),
        ("tc_chain_run", None, (POINTER(Chain), POINTER(Step))),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def bound() -> ctypes.CDLL:
    """The library where it is known to be there."""
    found = library()
    if found is None:
        raise RuntimeError(f"the CPU library {PATH} was not built")
    return found


def code_path() -> str:
    """Instruction set in use, one of ``CODE_PATHS``."""
    name: bytes = bound().tc_isa()
    return name.decode()


def set_code_path(name: str) -> None:
    """Use the code of another instruction set (for tests and measurements).

    Raises:
        ValueError: unknown, or this processor lacks it.
    """
    if bound().tc_set_isa(name.encode()) != 0:
        raise ValueError(f"code path {name!r}: not one of {', '.join(CODE_PATHS)}, or this processor lacks it")
