"""The list of all settings: names, types, limits, defaults and descriptions, as text or as a JSON schema.

Owns both forms. `settings.py` has the settings. Read `list_settings` first.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zeroshard.train.config import ALIASES, Config

__all__ = ["list_settings", "schema"]


def schema() -> str:
    """Return the JSON schema of the configuration, as `--config` files have it (in TOML).

    >>> import json
    >>> from zeroshard.train.listing import schema
    >>> json.loads(schema())["$defs"]["Train"]["properties"]["steps"]["minimum"]
    1
    """
    return json.dumps(Config.model_json_schema(), indent=2)


def list_settings() -> str:
    """Return one line for each setting, by section."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    definitions = Config.model_json_schema()["$defs"]
    other = {full: name for name, full in ALIASES.items()}
    for section in Config.model_fields:
        about = definitions[section.capitalize()]
        yield f"{section}: {about['description'].splitlines()[0]}"
        for key, one in about["properties"].items():
            alias = f" Also: {other[f'{section}.{key}']}." if f"{section}.{key}" in other else ""
            shown = json.dumps(one["default"])
            yield f"  {section}.{key} = {shown}  ({_type_of(one)})"
            yield f"      {one.get('description', '')}.{alias}"
        yield ""


def _type_of(one: Mapping[str, Any]) -> str:
    """Return the type of a setting in words, with its limits or choices."""
    if "anyOf" in one:
        return " or ".join(_type_of(part) for part in one["anyOf"])
    if "const" in one:
        return str(one["const"])
    if "enum" in one:
        return " | ".join(str(choice) or '""' for choice in one["enum"])
    limits = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    said = [f"{word} {one[key]:g}" for key, word in limits.items() if key in one]
    kinds = {"integer": "number without fraction", "number": "number", "string": "text", "boolean": "true | false"}
    return ", ".join([kinds[one["type"]], *said])
