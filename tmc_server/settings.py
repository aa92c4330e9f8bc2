"""Reads a TOML file, and environment variables on top, into frozen values that were checked once.

PREFIX_SERVER__LISTEN=0.0.0.0:50051 sets [server] listen. A value that starts like JSON is read as JSON.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError


class ConfigError(Exception):
    """The configuration cannot be used; the text names each key, its value and what is allowed."""


class Section(BaseModel):
    """A table of the file: frozen, and a key it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


Model = TypeVar("Model", bound=Section)


def read(model: type[Model], prefix: str, path: str | None, environment: Mapping[str, str]) -> Model:
    """Read and validate the configuration. Raises ConfigError.

    prefix: of the environment variables, with its underscore.  path None: defaults and environment only.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text())
        except OSError as exc:
            raise ConfigError(f"Cannot read {path}: {exc.strerror}.") from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path} is not TOML: {exc}.") from exc
    _add_environment(values, prefix, environment)
    try:
        return model.model_validate(values)
    except ValidationError as exc:
        raise ConfigError("\n".join(_explain(model, error) for error in exc.errors(include_url=False))) from exc


_USER_INFO = re.compile(r"(\w://)[^\s/@\"]*@")  # of a URL, where a password may stand


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting in effect. name: SECTION.KEY.  value: as JSON; "" for a secret that is set.  changed: from the default."""

    name: str
    value: str
    changed: bool
    secret: bool
    description: str


def settings_of(config: Section) -> Iterator[Setting]:
    """Yield all settings, in the order of their sections, without secrets and without the user info of URLs."""
    for name in type(config).model_fields:
        section = getattr(config, name)
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            is_secret = "SecretStr" in str(field.annotation)
            text = "" if is_secret and value else json.dumps(section.model_dump(mode="json", include={key})[key])
            text = _USER_INFO.sub(r"\1***@", text)
            yield Setting(
                name=f"{name}.{key}",
                value=text,
                changed=value != field.get_default(call_default_factory=True),
                secret=is_secret,
                description=field.description or "",
            )


def _add_environment(values: dict[str, Any], prefix: str, environment: Mapping[str, str]) -> None:
    for name, text in environment.items():
        section, separator, key = name.removeprefix(prefix).lower().partition("__")
        if name.startswith(prefix) and separator:
            part = values.setdefault(section, {})
            try:
                part[key] = json.loads(text) if text.startswith(("[", "{")) else text
            except ValueError as exc:
                raise ConfigError(f"{name} starts as JSON but is none: {exc}.") from exc


def _explain(model: type[BaseModel], error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    if error["type"] == "extra_forbidden":
        known = _keys_of(model, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(sorted(known))}."
        return f"{'.'.join(path)}: there is no such key; {hint}"
    text = error["msg"].removeprefix("Value error, ")
    return f"{'.'.join(path)}: {text}." if path else f"{text}."


def _keys_of(model: type[BaseModel], path: list[str]) -> list[str]:
    for part in path:
        if part.isdigit():
            continue
        nested = [each for each in _types_of(model.model_fields[part].annotation) if issubclass(each, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)


def _types_of(annotation: Any) -> list[type]:
    """The classes an annotation speaks of: of `tuple[ShardRange, ...]`, tuple and ShardRange."""
    inner = [found for part in get_args(annotation) for found in _types_of(part)]
    return [annotation, *inner] if isinstance(annotation, type) else inner
