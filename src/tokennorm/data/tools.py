"""Tools of a chat: what the model may call, and the calls that it makes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokennorm.errors import DataError

__all__ = ["argument_texts", "checked_tool_calls", "checked_tools", "tool_name", "with_name"]


def checked_tools(tools: Any, source: str) -> tuple[dict[str, Any], ...] | None:
    """Validate the ``tools`` of a row: a list of JSON schemas, or the same list as JSON text.

    Returns:
        The schemas as they are given to the chat template; None where there is none.

    Raises:
        DataError: not a list of objects with a name.
    """
    if isinstance(tools, str):
        tools = _parsed(tools, f"{source}: tools") if tools.strip() else None
    if not tools:
        return None
    if isinstance(tools, Mapping) or not isinstance(tools, Sequence):
        raise DataError(
            f"{source}: tools is a {type(tools).__name__}, not a list of tools",
            fix='write "tools": [{"type": "function", "function": {"name": ..., "parameters": {...}}}]',
        )
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or not isinstance(tool_name(tool), str) or not tool_name(tool):
            raise DataError(
                f"{source}: tool {index} has no name",
                fix='write {"type": "function", "function": {"name": ..., "parameters": {...}}}',
            )
    return tuple(dict(tool) for tool in tools)


def tool_name(tool: Mapping[str, Any]) -> Any:
    """The name of a tool or of a call, which may stand inside ``function``."""
    inner = tool.get("function")
    return (inner if isinstance(inner, Mapping) else tool).get("name")


def with_name(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The tool under another name."""
    inner = tool.get("function")
    return {**tool, "function": {**inner, "name": name}} if isinstance(inner, Mapping) else {**tool, "name": name}


def checked_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Validate the ``tool_calls`` of an assistant message.

    A call is ``{"type": "function", "function": {"name": ..., "arguments": {...}}}`` with or without the outer
    object and an ``id``. Arguments that are JSON text are read: templates write arguments as JSON themselves, and
    text would be quoted twice.

    Returns:
        The calls in the long form; an empty list where there is none.

    Raises:
        DataError: naming the call and what is wrong with it.
    """
    if not calls:
        return []
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise DataError(f"{where}: tool_calls is a {type(calls).__name__}, not a list of calls")
    return [_checked_call(call, f"{where}: tool call {index}") for index, call in enumerate(calls)]


def _checked_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise DataError(f"{where} is a {type(call).__name__}, not an object")
    given = {key: value for key, value in call.items() if value is not None}
    inner = given.get("function", {key: given[key] for key in ("name", "arguments") if key in given})
    if not isinstance(inner, Mapping):
        raise DataError(f"{where}: function is a {type(inner).__name__}, not an object")
    known = ("id", "type", "function") if "function" in given else ("id", "type", "name", "arguments")
    unknown = sorted({*given} - {*known} | {*inner} - {"name", "arguments"})
    if unknown:
        raise DataError(
            f"{where} has keys that tokennorm does not read: {', '.join(map(str, unknown))}",
            why="training as if they were not there could mean something other than the data says",
            fix='write {"type": "function", "function": {"name": ..., "arguments": {...}}}',
        )
    name, arguments = inner.get("name"), inner.get("arguments")
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"{where} has no name")
    if given.get("type", "function") != "function":
        raise DataError(f"{where} has the type {given['type']!r}", fix="only functions can be called")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{where}: arguments") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"{where}: arguments is a {type(arguments).__name__}, not an object",
            fix='write "arguments": {"name of the parameter": value}',
        )
    checked: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    return {"id": given["id"], **checked} if "id" in given else checked


def argument_texts(value: Any) -> Iterator[tuple[str, ...]]:
    """For every text or number in the arguments of a call, the ways in which a template may write it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield (str(key),)
            yield from argument_texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from argument_texts(item)
    elif isinstance(value, str):
        yield (value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1], repr(value)[1:-1])
    elif value is not None and not isinstance(value, bool):
        yield (str(value), json.dumps(value))


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{what} is text that is not JSON: {error.msg} at column {error.colno}") from error
