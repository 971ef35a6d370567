"""How a fault is built into a rank: by a function around one place of what the rank runs."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Fault = Callable[[int], None]  # called in each rank before it trains, with its number


@dataclass(frozen=True, kw_only=True)
class Trap:
    """What goes wrong without a word, and where in the design that is told of."""

    trap: str
    spec: str
    put_in: Fault


class Faults(dict[str, Trap]):
    """Traps by the names of their faults."""

    def fault(self, trap: str, *, spec: str) -> Callable[[Fault], Fault]:
        """Have a function of a rank among these, under its own name."""

        def listed(put_in: Fault) -> Fault:
            self[put_in.__name__] = Trap(trap=trap, spec=spec, put_in=put_in)
            return put_in

        return listed


def _always(*_: Any, **__: Any) -> bool:
    return True


def around(place: str, call: Callable[..., Any], *, where: Callable[..., bool] = _always) -> None:
    """Have ``call(original, *arguments)`` called in the place of ``module:function``.

    Or of ``module:Class.method``, a property's too. ``where(*arguments)`` says whether that can
    change anything. AttributeError or KeyError where there is no such place.
    """
    module, _, path = place.partition(":")
    *above, name = path.split(".")
    owner = functools.reduce(getattr, above, importlib.import_module(module))
    kept = vars(owner)[name]
    if isinstance(kept, classmethod):
        setattr(owner, name, classmethod(instead(place, kept.__func__, call, where=where)))
    elif isinstance(kept, property):
        setattr(owner, name, property(instead(place, kept.fget, call, where=where)))
    else:
        setattr(owner, name, instead(place, kept, call, where=where))


def instead(
    place: str, original: Any, call: Callable[..., Any], *, where: Callable[..., bool]
) -> Callable[..., Any]:
    """What stands in the place of ``original``. ``place`` is told to who looks on."""

    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not where(*args, **kwargs):
            return original(*args, **kwargs)
        return call(original, *args, **kwargs)

    return called


def at(
    place: str, *, where: Callable[..., bool] = _always
) -> Callable[[Callable[..., Any]], Fault]:
    """A fault that is one function around one place."""

    def put_in_there(call: Callable[..., Any]) -> Fault:
        @functools.wraps(call)
        def put_in(rank: int) -> None:
            around(place, call, where=where)

        return put_in

    return put_in_there
