"""Chat messages as a client sends them, and as a chat template takes them."""

from __future__ import annotations

from typing import Any

import msgspec

from kvhandoff.core.errors import RequestError, invalid


class Message(msgspec.Struct, kw_only=True):
    """One message. Which roles there are is the chat template's to say."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """What the template gets: contents as one string, arguments of past tool calls as objects.

    Text parts are joined by a newline, as vLLM does it for templates that take strings. The content that a
    message of tool calls alone doesn't have is an empty text: templates add it to others. Raises RequestError
    for parts that aren't text.
    """
    if not messages:
        raise invalid("messages", [], "at least one message")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.role}
    if message.content is None:
        if not message.tool_calls:
            raise invalid(f"{where}.content", None, "a string, or an array of text parts")
        result["content"] = ""
    elif isinstance(message.content, str):
        result["content"] = message.content
    else:
        parts = [_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(message.content)]
        result["content"] = "\n".join(parts)
    if message.tool_calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    for field in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, field)
        if value is not None:
            result[field] = value
    return result


def _part_text(part: dict[str, Any], where: str) -> str:
    if part.get("type") not in ("text", "input_text", "output_text"):
        raise invalid(f"{where}.type", part.get("type"), "'text' (this model takes text only)")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", text, "a string")
    return text


def _tool_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Templates print arguments with `tojson`: they want the object, clients send it as a string."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function", function, "an object with name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments else {}
        except msgspec.DecodeError as error:
            raise RequestError(
                f"{where}.function.arguments: not valid JSON ({error})", param=f"{where}.function.arguments"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}
