"""Forty JSON schemas that clients send, by the feature each is about. Every object has at least one finite instance."""

from __future__ import annotations

from typing import Any


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False, **more}


_TREE = _object({"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}})
_LIST = _object({"head": {"type": "boolean"}, "tail": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]}})
_EXPR = {
    "anyOf": [
        {"type": "number"},
        _object({"op": {"enum": ["+", "-", "*"]}, "args": {"type": "array", "items": {"$ref": "#/$defs/expr"}}}),
    ]
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": _object({"name": {"type": "string"}, "age": {"type": "integer"}}),
    "optional": _object({"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}}, ["b"]),
    "no properties": {"type": "object", "properties": {}, "additionalProperties": False},
    "nested": _object({"outer": _object({"inner": _object({"leaf": {"type": "boolean"}})})}),
    "ref": {
        "$defs": {"point": _object({"x": {"type": "number"}, "y": {"type": "number"}})},
        **_object({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
    },
    "definitions": {
        "definitions": {"id": {"type": "integer", "minimum": 1}},
        **_object({"id": {"$ref": "#/definitions/id"}}),
    },
    "ref to a property": _object({"a": {"enum": [1, 2]}, "b": {"$ref": "#/properties/a"}}),
    "escaped ref": {"$defs": {"a/b~c": {"const": 7}}, **_object({"v": {"$ref": "#/$defs/a~1b~0c"}})},
    "tree": {"$defs": {"tree": _TREE}, "$ref": "#/$defs/tree"},
    "linked list": {"$defs": {"list": _LIST}, "$ref": "#/$defs/list"},
    "expression": {"$defs": {"expr": _EXPR}, **_object({"e": {"$ref": "#/$defs/expr"}})},
    "root recursion": _object({"n": {"type": "integer"}, "next": {"$ref": "#"}}, ["n"]),
    "enum": _object({"color": {"enum": ["red", "green", "dark blue"]}}),
    "mixed enum": _object({"v": {"enum": ["x", 1, 2.5, None, True, ["a"], {"k": 1}]}}),
    "typed enum": _object({"v": {"type": "string", "enum": ['a"b', "c\\d", "e\nf", "日本"]}}),
    "const": _object({"version": {"const": "v1"}, "flag": {"const": False}, "zero": {"const": 0}}),
    "anyOf": _object({"v": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 5}, {"type": "null"}]}}),
    "anyOf objects": {
        "anyOf": [_object({"a": {"type": "integer"}}), _object({"b": {"type": "string", "maxLength": 4}})]
    },
    "oneOf by const": {
        "oneOf": [
            _object({"kind": {"const": "cat"}, "lives": {"type": "integer"}}),
            _object({"kind": {"const": "dog"}, "good": {"type": "boolean"}}),
        ]
    },
    "oneOf by type": _object(
        {"v": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}, {"type": "boolean"}]}}
    ),
    "allOf": {
        "allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"minProperties": 1}]
    },
    "allOf bounds": _object({"n": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 12}]}}),
    "type list": _object({"v": {"type": ["string", "null"]}, "w": {"type": ["integer", "boolean"]}}),
    "minItems": _object({"v": {"type": "array", "items": {"type": "integer"}, "minItems": 2}}),
    "item bounds": _object({"v": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}}),
    "empty array": _object({"v": {"type": "array", "items": {"type": "string"}, "maxItems": 0}}),
    "nested arrays": _object(
        {"m": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}, "minItems": 1}}
    ),
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False, "minItems": 2},
    "tuple and rest": {"type": "array", "prefixItems": [{"enum": ["h"]}], "items": {"type": "null"}, "minItems": 1},
    "array of objects": {"type": "array", "items": _object({"id": {"type": "integer"}}), "minItems": 1, "maxItems": 4},
    "unicode keys": _object({"größe": {"type": "integer"}, "名前": {"type": "string"}, "😀": {"type": "boolean"}}),
    "awkward keys": _object(
        {"a b": {"type": "null"}, 'q"uote': {"type": "null"}, "back\\slash": {"type": "null"}, "": {"type": "null"}}
    ),
    "integer range": _object({"i": {"type": "integer", "minimum": -17, "maximum": 120}}),
    "exclusive range": _object({"x": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}}),
    "half range": _object({"x": {"type": "number", "minimum": 2.5}, "i": {"type": "integer", "maximum": 9}}),
    "pattern": _object({"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}}),
    "loose pattern": _object({"code": {"type": "string", "pattern": "[0-9]+x"}}),
    "length": _object({"s": {"type": "string", "minLength": 2, "maxLength": 6}}),
    "formats": _object({"d": {"type": "string", "format": "date"}, "u": {"type": "string", "format": "uuid"}}),
    "date-time": _object({"t": {"type": "string", "format": "date-time"}, "e": {"type": "string", "format": "email"}}),
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "properties and map": {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
    },
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^x_[a-z]+$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "open object": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "anything": {},
    "description only": _object(
        {"v": {"type": "string", "title": "T", "description": "D", "default": "x", "examples": ["y"]}}
    ),
}

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "not": ({"properties": {"a": {"not": {"type": "string"}}}}, '"not"', "/properties/a"),
    "uniqueItems": ({"type": "array", "items": {"type": "array", "uniqueItems": True}}, '"uniqueItems"', "/items"),
    "if": ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, '"if"', ""),
    "contains": ({"anyOf": [{"type": "null"}, {"type": "array", "contains": {}}]}, '"contains"', "/anyOf/1"),
    "propertyNames": ({"propertyNames": {"pattern": "a"}}, '"propertyNames"', ""),
    "dependentRequired": (
        {"$defs": {"d": {"dependentRequired": {"a": ["b"]}}}, "$ref": "#/$defs/d"},
        '"dependentRequired"',
        "/$defs/d",
    ),
    "unevaluatedProperties": (
        {"properties": {"a/b": {"unevaluatedProperties": False}}},
        '"unevaluatedProperties"',
        "/properties/a~1b",
    ),
    "unknown format": ({"properties": {"z": {"type": "string", "format": "zip"}}}, "zip", "/properties/z"),
    "remote ref": ({"properties": {"r": {"$ref": "https://example.com/s.json"}}}, "example.com", "/properties/r"),
    "dangling ref": ({"properties": {"r": {"$ref": "#/$defs/none"}}}, "/$defs/none", "/properties/r"),
    "overlapping oneOf": (
        {"properties": {"v": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
        "oneOf",
        "/properties/v",
    ),
    "overlapping patterns": ({"patternProperties": {"a": {}, "b": {}}}, "not disjoint", ""),
    "look-around": ({"properties": {"p": {"type": "string", "pattern": "^(?!x)a"}}}, "look-around", "/properties/p"),
    "empty range": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5)", ""),
    "no value": (
        {"type": "object", "properties": {"n": {"type": "integer", "enum": ["a"]}}, "required": ["n"]},
        "'n' is unsatisfiable",
        "",
    ),
    "property counts": (
        {"items": {"type": "object", "properties": {"a": {}}, "minProperties": 1}, "type": "array"},
        "min/maxProperties",
        "/items",
    ),
}
"""schema, words of the message, JSON pointer."""
