"""JSON schemas of many kinds."""

from typing import Any


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


TEXT = {"type": "string", "maxLength": 12}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": _object(name=TEXT, age=NUMBER),
    "closed": {**_object(city=TEXT), "additionalProperties": False},
    "free string": _object(text={"type": "string"}),
    "boolean": _object(member={"type": "boolean"}, pet={"type": "null"}),
    "enum": _object(colour={"enum": ["red", "blue", 3, None, True]}),
    "const": _object(kind={"const": "person"}, age=NUMBER),
    "numbers": _object(ratio={"type": "number", "minimum": -1, "maximum": 1}),
    "range": _object(n={"type": "integer", "exclusiveMinimum": 17, "exclusiveMaximum": 23}),
    "nested": _object(person=_object(home=_object(city=TEXT, street=_object(name=TEXT)))),
    "array": _object(words={"type": "array", "items": TEXT, "minItems": 2, "maxItems": 3}),
    "objects": _object(people={"type": "array", "items": _object(age=NUMBER), "maxItems": 2}),
    "tuple": {
        "type": "array",
        "prefixItems": [NUMBER, TEXT],
        "items": False,
        "minItems": 2,
    },
    "any of": _object(value={"anyOf": [NUMBER, TEXT, {"type": "null"}]}),
    "two types": _object(value={"type": ["string", "null"], "maxLength": 5}),
    "optional": {
        "type": "object",
        "properties": {"a": NUMBER, "b": NUMBER, "c": NUMBER},
        "required": ["b"],
    },
    "pattern": _object(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"}),
    "formats": _object(
        day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}
    ),
    "definitions": {
        "$defs": {"point": _object(x=NUMBER, y=NUMBER)},
        **_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "recursive": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "leaf": NUMBER,
                    "twigs": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
                },
                "required": ["leaf"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    "odd names": _object(
        **{'say "so"': NUMBER, "größe\\": NUMBER, "<|close|>": NUMBER, "": NUMBER}
    ),
    "map": {
        "type": "object",
        "properties": {"n": NUMBER},
        "required": ["n"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "bare number": NUMBER,
    "bare text": TEXT,
}
