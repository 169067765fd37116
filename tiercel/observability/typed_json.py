"""JSON values as the types that dataclasses declare: decoders say which field does not fit."""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

Decode = Callable[[Any], Any]


class MisfitError(ValueError):
    """A JSON value is not what its field declares; says which field, and what it holds."""


def decoder(kind: Any) -> Decode:
    """What turns a JSON value into ``kind``.

    Args:
        kind: ``bool``, ``int``, ``float``, ``str``, ``Any``, ``T | U | None``, ``list[T]``, ``tuple[T, ...]``,
            ``dict[str, Any]``, an enumeration of strings, or a dataclass of such fields (fields that it does not declare are
            passed over).

    Raises:
        MisfitError: (when called) the value does not fit.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return _one_of([decoder(a) for a in arguments if a is not NoneType])
    if origin in (list, tuple):
        return _sequence(origin, decoder(arguments[0]))
    if is_dataclass(kind):
        return _object(kind)
    if kind is Any:
        return lambda value: value
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind)
    return _plain(origin or kind)


def _one_of(decoders: list[Decode]) -> Decode:
    *others, last = decoders

    def decode(value: Any) -> Any:
        if value is None:
            return None
        for one in others:
            try:
                return one(value)
            except MisfitError:
                continue
        return last(value)

    return decode


def _plain(kind: type) -> Decode:
    allowed = (float, int) if kind is float else (kind,)

    def decode(value: Any) -> Any:
        if type(value) not in allowed:  # exactly: True is no integer
            raise MisfitError(f"{value!r:.60} is no {kind.__name__}")
        return value

    return decode


def _member(kind: type[Enum]) -> Decode:
    def decode(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError as error:
            raise MisfitError(f"{value!r:.60} is none of {', '.join(str(m.value) for m in kind)}") from error

    return decode


def _sequence(kind: type, item: Decode) -> Decode:
    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise MisfitError(f"{value!r:.60} is no list")
        return kind(map(item, value))

    return decode


def _object(kind: Any) -> Decode:
    hints = get_type_hints(kind)
    parts = {f.name: decoder(hints[f.name]) for f in fields(kind)}
    optional = {f.name for f in fields(kind) if f.default is not MISSING or f.default_factory is not MISSING}

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise MisfitError(f"{value!r:.60} is no object")
        found = {}
        for name, part in parts.items():
            if name in value:
                try:
                    found[name] = part(value[name])
                except MisfitError as error:
                    raise MisfitError(f"{name}: {error}") from error
            elif name not in optional:
                raise MisfitError(f"{name} is missing")
        return kind(**found)

    return decode
