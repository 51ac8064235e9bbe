"""What all parts of the configuration share: a base class that checks each field's type, and checks of values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.field_types import annotations_of, as_field_value, type_in_words


class CheckedSpec:
    """Base of all sections: checks each field against its annotation, for values from files and from Python.

    A section names the fields that must be above zero, and those that must not be negative; None is a value that is not set.
    """

    SECTION: ClassVar[str] = ""
    """The section's key (`train` for `TrainSpec`); empty for what stands at the top."""
    _above_zero: ClassVar[Sequence[str]] = ()
    _not_negative: ClassVar[Sequence[str]] = ()

    def __init_subclass__(
        cls, *, section: str = "", above_zero: Sequence[str] = (), not_negative: Sequence[str] = ()
    ) -> None:
        super().__init_subclass__()
        cls.SECTION, cls._above_zero, cls._not_negative = section, above_zero, not_negative

    def __post_init__(self) -> None:
        for name, annotation in annotations_of(type(self)).items():  # type: ignore[arg-type]  # a class has a hash
            value = getattr(self, name)
            try:
                plain = as_field_value(value, annotation)
            except TypeError as error:
                key = f"{self.SECTION}.{name}" if self.SECTION else name
                raise ConfigError(f"`{key}` is {value!r}, but it must be {type_in_words(annotation)}.") from error
            if plain is not value:
                object.__setattr__(self, name, plain)  # the class is frozen, also for this method
        for name in self._above_zero:
            value = getattr(self, name)
            is_right = value is None or value == "auto" or value > 0
            require(is_right, f"`{self.SECTION}.{name}` is {value!r}, but it must be above zero.")
        for name in self._not_negative:
            value = getattr(self, name)
            require(value is None or value >= 0, f"`{self.SECTION}.{name}` is {value!r}, but it must not be negative.")


def require(condition: bool, message: str) -> None:
    """Raise a ConfigError with this message unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_command(section: str, command: tuple[str, ...]) -> None:
    """Refuse a command that no system can start."""
    require(
        not re.search("[\0\ud800-\udfff]", "".join(command)) and (not command or bool(command[0])),
        f"`{section}.command` is {list(command)!r}, but its first word must name a program, and no word may have a NUL character, or bytes that are not UTF-8.",
    )


def require_one_line(section: str, **values: object) -> None:
    """Refuse texts with a line break, which would start a new line in the job script."""
    for key, value in values.items():
        texts = map(str, value if isinstance(value, tuple) else [value])
        require(
            not any("\n" in text or "\0" in text for text in texts),
            f"`{section}.{key}` is {value!r}, but it must be one line: a line break in it would start a new line in the job script.",
        )
