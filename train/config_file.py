"""Configurations from a YAML file and ``key=value`` overrides.

A configuration is a list of assignments to a structured tree. Each assignment remembers where it came from, so an
unknown key or a wrong type is refused by name, with its file and line (or its override) and what would have been right.
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config import Comparison, Config
from .errors import ConfigError, close_to, first_line
from .validation import validate

C = TypeVar("C", bound=Config)


def packaged() -> list[str]:
    """Names of the configurations that ship with the library."""
    folder = importlib.resources.files(_configs_package())
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file (a path or a packaged name), apply ``key=value`` overrides, check it.

    Raises ConfigError with one line: the file and line or the override, the key, and what would be right.
    """
    return _load(name, overrides, Config)


def load_comparison(name: str, overrides: Sequence[str] = ()) -> Comparison:
    """The same, for `evenload compare`: with a section `compare`."""
    return _load(name, overrides, Comparison)


def _load(name: str, overrides: Sequence[str], schema: type[C]) -> C:
    origin, text = _read(name)
    tree = OmegaConf.structured(schema)
    origins: dict[str, str] = {}
    assignments = _assignments_of_file(text, origin, tree)
    for where, key, value in [*assignments, *map(_assignment_of_override, overrides)]:
        _assign(tree, where, key, value)
        origins[_root(key)] = where
    try:
        config: C = OmegaConf.to_object(tree)  # type: ignore[assignment]
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        named = [origins[key] for word in re.findall(r"\w+", str(error)) if (key := f"model.{word}") in origins]
        key = getattr(error, "full_key", None) or "model"  # the model checks itself; all else is OmegaConf's
        named += [origins[root] for root in (_root(key),) if root in origins]
        raise ConfigError(f"{', '.join(dict.fromkeys(named)) or origin}: {key}: {first_line(error)}") from error
    if config.run.out is None:
        config.run.out = f"runs/{Path(name).stem}"
    validate(config, origins)
    return config


def _configs_package() -> str:
    return f"{__package__.rpartition('.')[0]}.configs"


def _read(name: str) -> tuple[str, str]:
    """(where, text) of a configuration; a path wins over a packaged name."""
    path = Path(name)
    if path.is_file():
        try:
            return name, path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"{name}: cannot be read as UTF-8 text: {first_line(error)}") from error
    if name in packaged():
        return f"{name}.yaml", (importlib.resources.files(_configs_package()) / f"{name}.yaml").read_text(encoding="utf-8")
    raise ConfigError(
        f"{name}: neither a file nor a packaged configuration ({', '.join(packaged())}){close_to(name, packaged())}"
    )


def _assignments_of_file(text: str, origin: str, schema: DictConfig) -> Iterator[tuple[str, str, Any]]:
    """(where, key, value) of every leaf of a two-level YAML file, `where` being file:line."""
    try:
        nodes = yaml.compose(text)
        if nodes is None:
            return
        if not isinstance(nodes, yaml.MappingNode):
            raise ConfigError(f"{origin}: expected sections ({', '.join(map(str, schema))}), found a list or a word")
        content = cast(DictConfig, OmegaConf.create(text))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{origin}{line}: not valid YAML: {getattr(error, 'problem', None) or first_line(error)}") from error
    for section, body in nodes.value:
        where = f"{origin}:{section.start_mark.line + 1}"
        if section.value not in schema:
            if section.value in Comparison.__dataclass_fields__:
                continue
            hint = close_to(section.value, list(schema)) or close_to(section.value, _known_keys(schema))
            raise ConfigError(f"{where}: unknown section {section.value!r}{hint}; sections: {', '.join(map(str, schema))}")
        if not isinstance(body, yaml.MappingNode):
            raise ConfigError(f"{where}: section {section.value!r} must hold keys and values")
        values = cast(dict[Any, Any], OmegaConf.to_container(content[section.value]))
        for key, _ in body.value:
            where = f"{origin}:{key.start_mark.line + 1}"
            if key.tag != "tag:yaml.org,2002:str":
                raise ConfigError(f"{where}: {key.value!r} in section {section.value!r}: keys are plain words, without <<")
            yield where, f"{section.value}.{key.value}", values[key.value]


def _assignment_of_override(text: str) -> tuple[str, str, Any]:
    where = f"override {text!r}"
    key, equals, _ = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{where}: write it as key=value, for example run.steps=200")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text[len(key) + 1 :]}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{where}: the value is not valid YAML") from error
    return where, key, parsed["value"]  # type: ignore[index,call-overload]


def _assign(tree: DictConfig, where: str, key: str, value: Any) -> None:
    root = _root(key)
    if root in tree:
        raise ConfigError(
            f"{where}: {key!r} is a section; set one of its keys, for example {root}.{next(iter(tree[root]))}=..."
        )
    if root not in (known := _known_keys(tree)):
        raise ConfigError(f"{where}: unknown key {key!r}{close_to(root, known)}")
    parent = key.rpartition(".")[0]
    try:
        if OmegaConf.select(tree, parent) is None:
            raise ConfigError(f"{where}: there is no {parent}")
        OmegaConf.update(tree, key, value, merge=isinstance(value, list))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {key}: {first_line(error)}{_close_in(error)}") from error
    except ConfigError:
        raise
    except ValueError as error:  # how OmegaConf says that a list has no names
        raise ConfigError(f"{where}: {key}: {parent} is a list; write {parent}[0].{key.rpartition('.')[2]}=...") from error


def _root(key: str) -> str:
    """section.key of a key that may go deeper, such as data.sources[0].weight."""
    return ".".join(re.split(r"[.\[]", key)[:2])


def _known_keys(schema: DictConfig) -> list[str]:
    return [f"{section!s}.{key!s}" for section in schema for key in schema[section]]


def _close_in(error: OmegaConfBaseException) -> str:
    """A suggestion for an unknown key inside a structured value, such as one source."""
    if error.object_type is None or not hasattr(error.object_type, "__dataclass_fields__") or error.key is None:
        return ""
    names = list(error.object_type.__dataclass_fields__)
    return "" if error.key in names else f"{close_to(error.key, names)}; keys: {', '.join(names)}"
