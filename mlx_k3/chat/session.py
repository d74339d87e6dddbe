"""A conversation with a model: messages, the cache that goes with them, save and load.

Owns what is kept between turns. A KDA state belongs to the whole text read so far and cannot be
trimmed, so the last answer's cache goes on only where the new prompt begins with exactly the ids
in it. Elsewhere a :class:`~.prompt_cache.PromptCache`, if there is one, has the nearest state.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import K3Error
from ..media.attachments import Attachment
from . import xtml
from .attaching import Source, attach, attachments, detached, media_of, media_parts, question
from .generation import Chunk, PlainParser, Reply, Sampling, generate, run, stream_generate
from .preparing import conversation_ids, reply_parser
from .prompt_cache import PromptCache
from .saved import read_saved, write_saved
from .xtml_parser import ReplyParser, parse_conversation, tags

__all__ = ["Chunk", "Reply", "Session", "Stats", "generate", "stream_generate"]


@dataclass
class Stats:
    """Sums over a session's answers."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Session:
    """A conversation that remembers.

    >>> session = Session(model, tokenizer, system="Answer in one sentence.")
    >>> for chunk in session.turn("What is a delta rule?"):
    ...     print(chunk.text, end="", flush=True)

    Closing the iterator of a turn (or an exception in it) keeps what was said so far.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: TokenizerWrapper,
        *,
        system: str | None = None,
        thinking: bool = True,
        thinking_effort: str | None = "max",
        tools: list[dict[str, Any]] | None = None,
        prompts: PromptCache | None = None,
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._settings = {
            "thinking": thinking,
            "thinking_effort": thinking_effort,
            "tools": tools,
        }
        self.system = system
        self._messages: list[dict[str, Any]] = []
        self.stats = Stats()
        self.reply: Reply | None = None  # the last one
        # Position in `messages` -> the message's ids as they were generated. Encoding an answer's
        # text again can give other ids, and then the cache would be of no use.
        self._generated: dict[int, list[int]] = {}
        self._cache: list[Any] | None = None
        self._cached_ids: list[int] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, without the system message."""
        return list(self._messages)

    def reset(self) -> None:
        """Forget the messages; the system message and the settings stay."""
        self._messages.clear()
        self._generated.clear()
        self._drop_cache()

    def opened(
        self, images: Sequence[Source] = (), videos: Sequence[Source] = ()
    ) -> list[Attachment]:
        """Pictures and videos as :meth:`turn` may be given them, checked and counted.

        Raises:
            K3Error: one cannot be opened, or the model sees nothing.
        """
        return attachments(self._model, images, videos)

    @staticmethod
    def shown(messages: Sequence[dict[str, Any]]) -> list[Attachment]:
        """The pictures and videos of ``messages`` of this conversation."""
        return [part["attachment"] for part in media_parts(messages)]

    def turn(
        self,
        content: str | Sequence[dict[str, Any]],
        *,
        images: Sequence[Source] = (),
        videos: Sequence[Source] = (),
        max_tokens: int | None = 4096,
        temp: float = 0.0,
        top_p: float = 1.0,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Say ``content`` and stream the answer. The last chunk's ``reply`` tells what it cost.

        ``content`` is a user's text, or messages (the results of tools, say). ``images`` and
        ``videos`` stand before a text, or take their places in messages; see
        :func:`~.generation.stream_generate`.

        Closed early, the answer so far is kept and the conversation can go on; an answer of which
        nothing came takes the question back with it.

        Raises:
            K3Error: an empty message, options out of range, or a picture that cannot be seen.
        """
        sampling = Sampling(max_tokens, temp, top_p, options)
        if isinstance(content, str):
            has_content = content.strip() or images or videos
            shown = self.opened(images, videos)
            content, images, videos = [question(content, shown)] if has_content else [], (), ()
        if not content:
            raise K3Error("the message is empty")
        # All of them, for there is a limit to the pictures of a conversation.
        messages = [*self._messages, *content]
        messages = attach(messages, self._model, images=images, videos=videos)
        return self._turn(messages[len(self._messages) :], sampling)

    def _turn(self, question: list[dict[str, Any]], sampling: Sampling) -> Iterator[Chunk]:
        self._messages += question
        parser = reply_parser(self._tokenizer, self._settings["thinking"])
        generated: list[int] = []
        at_a_token = False  # the cache holds exactly the prompt and `generated`
        try:
            prompt = self._prompt()
            cached_tokens = self._fit_cache(prompt)
            sampling.options["prompt_cache"] = self._cache
            chunks = run(
                self._model,
                self._tokenizer,
                prompt,
                parser,
                sampling,
                cached_tokens=cached_tokens,
                prompts=self._prompts,
                media=media_of(self._messages),
            )
            with closing(chunks):
                for chunk in chunks:
                    generated.append(chunk.token)
                    self.reply = chunk.reply
                    at_a_token = True
                    yield chunk
                    at_a_token = chunk.reply is not None
        finally:
            if at_a_token:
                self._cached_ids = prompt + generated
            else:
                self._drop_cache()
            if generated:
                self._keep_answer(parser, generated)
                self._count(len(prompt), cached_tokens, len(generated))
            else:
                del self._messages[-len(question) :]

    def take_back(self) -> list[dict[str, Any]]:
        """Remove the last question and its answer, and return the question.

        Raises:
            K3Error: there is none.
        """
        roles = [message["role"] for message in self._messages]
        end = len(roles)
        while end and roles[end - 1] == "assistant":
            end -= 1
        begin = end
        while begin and roles[begin - 1] != "assistant":
            begin -= 1
        question = self._messages[begin:end]
        if not question:
            raise K3Error("nothing has been asked yet")
        del self._messages[begin:]
        self._generated = {i: ids for i, ids in self._generated.items() if i < begin}
        return question

    def save(self, path: str | Path, *, with_states: bool = False) -> None:
        """Write the conversation as JSON, in place of what was there.

        ``with_states`` adds the keys of what the prompt cache has of it.

        Raises:
            K3Error: the file cannot be written.
        """
        saved = {
            "system": self.system,
            **self._settings,
            "messages": detached(self._messages),
            # With these, an answer read back is the one given, token for token.
            "generated_ids": {str(i): ids for i, ids in self._generated.items()},
        }
        if with_states and self._prompts is not None and self._messages:
            saved["states"] = self._prompts.states_of(self._prompt())
        write_saved(Path(path), saved)

    def load(self, path: str | Path) -> None:
        """Take up a saved conversation in place of this one, with its settings.

        Raises:
            K3Error: no such file, not a saved conversation, or its pictures cannot be seen. This
                one then stays as it is.
        """
        saved = read_saved(Path(path))
        messages, generated = saved["messages"], saved.get("generated_ids", {})
        if not isinstance(generated, dict):
            raise K3Error(f"{path}: generated_ids is no object; delete it from the file")
        settings = {key: saved.get(key, value) for key, value in self._settings.items()}
        messages = attach(messages, self._model)
        # Renders before anything is replaced: a message that does not fit is found here.
        conversation_ids(self._tokenizer, messages, **settings)

        self.reset()
        self.system, self._settings, self._messages = saved.get("system"), settings, messages
        for key, ids in generated.items():
            if self._tokenizer.speaks_xtml and key.isdecimal() and int(key) < len(messages):
                self._keep_ids(int(key), ids)

    def _prompt(self) -> list[int]:
        messages, offset = self._messages, 0
        if self.system is not None:
            messages, offset = [{"role": "system", "content": self.system}, *messages], 1
        if not self._tokenizer.speaks_xtml:
            return conversation_ids(self._tokenizer, messages, **self._settings)
        rendered = xtml.render(messages, **self._settings)
        ids = xtml.encode(rendered.head, self._tokenizer)
        for position, segments in enumerate(rendered.messages, start=-offset):
            known = self._generated.get(position)
            ids += xtml.encode(segments, self._tokenizer) if known is None else known
        return ids + xtml.encode(rendered.tail, self._tokenizer)

    def _fit_cache(self, prompt: list[int]) -> int:
        """Make the cache one that ``prompt`` continues; returns how many ids it already holds."""
        held = len(self._cached_ids)
        if self._cache is None or held >= len(prompt) or prompt[:held] != self._cached_ids:
            self._drop_cache()  # before there is another
            if self._prompts is None:
                self._cache, rest = make_prompt_cache(self._model), prompt
            else:
                self._cache, rest = self._prompts.fetch(prompt)
            self._cached_ids = prompt[: len(prompt) - len(rest)]
        return len(self._cached_ids)

    def _drop_cache(self) -> None:
        self._cache, self._cached_ids = None, []
        mx.clear_cache()

    def _keep_answer(self, parser: ReplyParser | PlainParser, generated: list[int]) -> None:
        parser.finish()
        self._messages.append(parser.message)
        ending = parser.closing()
        if ending is not None:
            opening = xtml.reply_opening(self._settings["thinking"])
            ids = xtml.encode(opening, self._tokenizer) + generated
            self._keep_ids(len(self._messages) - 1, ids + xtml.encode(ending, self._tokenizer))

    def _keep_ids(self, position: int, ids: Any) -> None:
        """Use ``ids`` for the message at ``position`` from now on, if they are a rendering of it.

        An answer with faulty markup, and ids from a file that say something else, are not.
        """
        table, message = self._tokenizer.table, self._messages[position]
        if not isinstance(ids, list) or not all(
            isinstance(i, int) and 0 <= i < len(table.pieces) for i in ids
        ):
            return
        rendered = xtml.render([message], thinking=self._settings["thinking"]).messages[0]
        same_tags = tags(ids, table) == tags(xtml.encode(rendered, self._tokenizer), table)
        if same_tags and parse_conversation(ids, table) == [message]:
            self._generated[position] = ids

    def _count(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> None:
        self.stats.answers += 1
        self.stats.prompt_tokens += prompt_tokens
        self.stats.cached_tokens += cached_tokens
        self.stats.generated_tokens += generated_tokens
