"""ChatTemplate: messages to text to ids, as the model's own Jinja template writes them; what users typed stays text.

Templates come with models, so they run in a sandbox. Parsing of replies (tools, reasoning) is the server's. Called by llm.py and server/.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from flatout.modelfile.spec import ModelFileError
from flatout.request import ModelFacts, RequestError
from flatout.text.prepare import NOT_TEXT, check_length
from flatout.text.tokenizer import Tokenizer, is_broken

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
Message = Mapping[str, Any]


class ChatTemplate:
    """Compiled once. Without a template every use is a RequestError that tells how to give one.

    Special tokens that messages, tools or template arguments spell out stay ordinary text unless `allow_special_in_messages`: only the template
    itself can write one. Text without them gets the same ids either way.
    """

    def __init__(self, template: str | Mapping[str, str] | None, tokenizer: Tokenizer, *, allow_special_in_messages: bool = False):
        """`template`: one, or several by name, of which "tool_use" is for requests with tools and "default" for the others.

        Raises ModelFileError with the line where a template is broken.
        """
        self._tokenizer = tokenizer
        self._allow_special = allow_special_in_messages
        named = {"default": template} if isinstance(template, str) else dict(template or {})
        if named and "default" not in named:
            raise ModelFileError(f"chat templates {', '.join(sorted(named))}: none is named default; choose with --chat-template")
        self._templates = {name: _compile(name, text) for name, text in named.items()}
        # Roles beyond the usual must be named by the template: some templates write <|role|>, and a role "end" would end the turn
        self._roles = set(ROLES).union(*(_string_constants(text) for text in named.values()))
        # Marks are digits only, so that no filter of a template changes them
        self._mark, self._end_mark = (f"{secrets.randbelow(10**24):024d}" for _ in range(2))
        self._texts = {id: text for text, id in tokenizer.special_texts.items()}
        self._marked = re.compile(rf"{self._mark}(\d{{7}})")
        self._marked_or_special = re.compile(f"{self._marked.pattern}|{tokenizer.special_pattern.pattern}")

    @classmethod
    def for_model(cls, tokenizer: Tokenizer, override: str | None = None, *, allow_special_in_messages: bool = False) -> ChatTemplate:
        """The model's template, or `override`: a Jinja file or the text itself (--chat-template)."""
        if override is None:
            return cls(tokenizer.chat_template, tokenizer, allow_special_in_messages=allow_special_in_messages)
        if "{" not in override:  # no Jinja text can do without
            file = Path(override).expanduser()
            if not file.is_file():
                raise ModelFileError(f"--chat-template: no file {override!r}, and it isn't Jinja text either")
            override = file.read_text(encoding="utf-8")
        return cls(override, tokenizer, allow_special_in_messages=allow_special_in_messages)

    def encode(self, messages: Sequence[Message], facts: ModelFacts | None = None, /, **options: Any) -> list[int]:
        """Ids of the conversation; options are render's. The template writes start and end tokens; none is added to its text.

        `facts`: what the model's context cannot hold is refused before it is tokenised (check_length, of the text as rendered).
        """
        chat = self._check(messages)
        try:
            plain = self._allow_special or not _any_text(self._tokenizer.has_special_text, (chat, options))
            if not plain:
                chat, options = _map_text(self._set_marks, chat), _map_text(self._set_marks, options)
            text = self._render(chat, **options)
            if facts is not None:
                check_length("messages", self._without_marks(text), self._tokenizer, facts)
            if plain:
                return self._tokenizer.encode(text, add_special_tokens=False)
            return self._tokenizer.encode_ordinary(self._marked_or_special.sub(self._respell, text))
        except UnicodeError:
            parts = {**{f"messages[{i}]": message for i, message in enumerate(chat)}, **options}
            raise RequestError(next((name for name, part in parts.items() if _any_text(is_broken, part)), "messages"), NOT_TEXT) from None

    def render(self, messages: Sequence[Message], /, **options: Any) -> str:
        """The conversation as text. Options:

        tools: list of JSON schemas. add_generation_prompt (true unless the last message is continued): opens the model's turn.
        continue_final_message: leaves the last message open for the model to go on with. Others go to the template as they are
        (enable_thinking, documents, ...). Raises RequestError naming the message, or with the template's own words.
        """
        return self._render(self._check(messages), **options)

    def _render(
        self,
        chat: list[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **arguments: Any,
    ) -> str:
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message", "cannot be true together with add_generation_prompt: a turn is opened or continued"
            )
        if "messages" in arguments:
            raise RequestError("messages", "cannot be given to the template a second time, as an argument")
        if tools is not None:
            _list("tools", tools)
        if continue_final_message:
            chat = [*chat[:-1], self._with_open_end(chat[-1])]
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        opens_turn = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        variables = {"documents": None, **self._tokenizer.special_tokens_map, **arguments}
        try:
            text = template.render({**variables, "messages": chat, "tools": tools, "add_generation_prompt": opens_turn})
        except _Refusal as error:
            raise RequestError("messages", self._without_marks(str(error))) from None
        except Exception as error:  # templates are programs: what theirs does with these messages is the request's fault, not ours
            said = self._without_marks(f"{type(error).__name__}: {error}")
            raise RequestError("messages", f"the chat template failed on them: {said}") from error
        return self._cut_open_end(text) if continue_final_message else text

    # -- messages ---------------------------------------------------------------------------------------------------

    def _check(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as templates want them: content as text, no keys without value, arguments of tool calls as objects."""
        if not isinstance(messages, list | tuple):
            raise RequestError("messages", f"must be a list, got {type(messages).__name__}")
        if not messages:
            raise RequestError("messages", "must not be empty")
        if not self._templates:
            raise RequestError("messages", "this model has no chat template; give one with --chat-template FILE, or send a prompt")
        return [self._check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]

    def _check_message(self, name: str, message: Message) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise RequestError(name, f"must be an object with role and content, got {message!r:.80}")
        role = message.get("role")
        if not isinstance(role, str) or role not in self._roles:
            raise RequestError(f"{name}.role", f"must be one of {', '.join(ROLES)}, or one that the chat template names; got {role!r:.80}")
        checked = {key: value for key, value in message.items() if value is not None}
        calls = checked.get("tool_calls")
        if "content" in checked:
            checked["content"] = _text_of(f"{name}.content", checked["content"])
        elif not calls:
            raise RequestError(f"{name}.content", "is missing: only a message with tool_calls may do without")
        if calls:
            checked["tool_calls"] = [
                _check_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(_list(f"{name}.tool_calls", calls))
            ]
        return checked

    def _with_open_end(self, message: dict[str, Any]) -> dict[str, Any]:
        if "content" not in message:
            raise RequestError("continue_final_message", "the last message has no content to continue")
        return {**message, "content": f"{message['content']}{self._end_mark} "}

    def _cut_open_end(self, text: str) -> str:
        """Up to the end of the last message's content. A template that trims content has trimmed the space behind the mark, too."""
        content, mark, rest = text.rpartition(self._end_mark)
        if not mark:
            raise RequestError("continue_final_message", "the chat template leaves out the last message's content")
        return content if rest.startswith(" ") else content.rstrip()

    # -- special tokens in users' text ------------------------------------------------------------------------------

    def _set_marks(self, text: str) -> str:
        """Special tokens in a user's text become marks, which mean nothing to a template."""
        return self._tokenizer.special_pattern.sub(lambda found: f"{self._mark}{self._tokenizer.special_texts[found[0]]:07d}", text)

    def _without_marks(self, text: str) -> str:
        return self._marked.sub(lambda found: self._texts[int(found[1])], text)

    def _respell(self, found: re.Match[str]) -> str:
        """In rendered text: a mark becomes the user's text again; a special token, now the template's own, gets its private spelling."""
        return self._texts[int(found[1])] if found[1] else self._tokenizer.spelled(self._tokenizer.special_texts[found[0]])


class _Refusal(jinja2.TemplateError):
    """raise_exception() of a template."""


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a trainer learns from; for us it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Plain JSON: jinja2's own filter escapes <, > and & for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()


def _compile(name: str, text: str) -> jinja2.Template:
    try:
        return _ENVIRONMENT.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        which = "chat template" if name == "default" else f"chat template {name}"
        raise ModelFileError(f"{which}, line {error.lineno}: {error.message}; mend it or give another with --chat-template") from None


def _string_constants(text: str) -> set[str]:
    return {node.value for node in _ENVIRONMENT.parse(text).find_all(jinja2.nodes.Const) if isinstance(node.value, str)}


def _list(name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise RequestError(name, f"must be a list, got {type(value).__name__}")
    return value


def _text_of(name: str, content: Any) -> str:
    """Text as it is; a list of text parts joined."""
    if isinstance(content, str):
        return content
    parts = []
    for i, part in enumerate(_list(name, content)):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise RequestError(
                f"{name}[{i}]", f"must be a part of type text: this model reads nothing else; got {kind or type(part).__name__}"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{name}[{i}].text", "must be a string")
        parts.append(part["text"])
    return "".join(parts)


def _check_call(name: str, call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, which templates write out as JSON; the API has them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(name, "must be an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise RequestError(f"{name}.function.arguments", f"must be JSON: {error}") from None
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _map_text(change: Callable[[str], str], value: Any) -> Any:
    """The value with every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_text(change, key): _map_text(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(change, item) for item in value]
    return value


def _any_text(test: Callable[[str], bool], value: Any) -> bool:
    """Whether any string in the value passes the test, keys too."""
    if isinstance(value, str):
        return test(value)
    if isinstance(value, Mapping):
        return any(_any_text(test, key) or _any_text(test, item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return any(_any_text(test, item) for item in value)
    return False
