"""The stage between the messages of an API and a chat template: finds out which forms the template takes, gives the
messages these forms, and checks that every text arrived in the prompt. Pure; part of `BodyWork`.

Templates refuse or drop what their author did not think of: a second system turn, two calls in one turn, content that
is a string. So for each of these (`turn_probes.py`) a small chat of unlike words is rendered once, and the first form
(`turn_forms.py`) whose words are all in the prompt is the one for this template. One decision holds for all chats, so
the prompt of a longer chat begins as that of a shorter one does. Each chat is then rendered once more with a word in
the place of each text. A text whose word is missing would not reach the model: the request is refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from chitu.errors import InvalidRequest
from chitu.http.ask import image_turns
from chitu.http.ask import turn_forms as forms
from chitu.http.ask import turn_probes as probes
from chitu.http.ask.images import SentImages
from chitu.http.ask.turn_forms import Reform, Turn, unchanged
from chitu.http.ask.turn_probes import Form, in_words
from chitu.http.messages.call_formats import text_of_calls
from chitu.http.messages.call_parser import CallParser
from chitu.http.messages.section_calls import KIMI_BEGIN

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, bool, Mapping[str, Any]], str]
"""Renders messages, tools, whether the model's turn begins, and variables. InvalidRequest if the template refuses."""
MAX_KEPT = 256
"""Verdicts on shapes of chats that are kept."""
MAX_KEPT_CHARS = 1 << 14
"""Longest shape that is kept: clients choose its ids and variables, so all that are kept have 4 MiB at most."""
SYSTEM_TOOLS = "message['tools']"
MAX_NAMED = 4
"""Fields that a warning names."""
OF_NEXT_TURN = (
    "the model's chat template has no images in results of tools, so they are in a turn of the user behind the results"
)
NOT_IN_RESULTS = "the model's chat template has no place for images in results of tools, so the prompt leaves them out"
END = "zqend0x"
"""Word that marks the end of a turn that the model continues."""


class ChatTurns:
    """The stage of one chat template."""

    def __init__(
        self,
        render: Render,
        source: str,
        variables: frozenset[str],
        calls: type[CallParser] | None = None,
        *placeholders: str,
    ) -> None:
        """`source`, `variables`: the template's text, and what it reads. `calls`: parser of the model's calls.
        `placeholders`: what it writes for an image, and for a video."""
        self._render = render
        self._is_kimi = KIMI_BEGIN in source
        self._has_tools = "tools" in variables
        self.tools_in_system = not self._has_tools and SYSTEM_TOOLS in source
        """The template reads the tools from a turn of the system (Phi-4-mini's)."""
        self._calls = calls
        self._placeholders = placeholders
        self._places_of_images = functools.cache(self._find_places_of_images)
        self._chosen = functools.cache(self._choose)
        self._missing = functools.lru_cache(MAX_KEPT)(self._find_missing)

    @property
    def takes_several_calls(self) -> bool:
        """Whether an answer with several calls can be sent back: some templates (Llama 3's) accept only one a turn."""
        return self._chosen(self._has_tools).takes_several

    @property
    def num_kept(self) -> int:
        """Shapes of chats whose verdict is kept."""
        return self._missing.cache_info().currsize

    def prompt(
        self,
        messages: Sequence[Turn],
        tools: Sequence[dict[str, Any]] | None,
        variables: Mapping[str, Any],
        add_generation_prompt: bool = True,
        continues: bool = False,
        images: SentImages | None = None,
        warnings: list[str] | None = None,
    ) -> str:
        """Return the prompt's text; if it `continues`, it ends with the last message, which is the assistant's. Raise
        InvalidRequest if the template refuses the messages in any form, or leaves a text or an image out. `images`:
        those of the marks in the content; `warnings` gets a sentence about what becomes of them."""
        turns = list(messages)
        if continues:
            if turns[-1]["role"] != "assistant" or turns[-1].get("tool_calls"):
                where = f"messages[{len(turns) - 1}]"
                raise InvalidRequest(f"{where}: only a text of the assistant can be continued", where)
            turns[-1] = {**turns[-1], "content": turns[-1]["content"] + END, "prefix": True}
        turns = self.reformed(turns, bool(tools), variables, bool(images))
        if images:
            self._tell_places(images, list(messages), turns, bool(tools), warnings)
            turns = image_turns.in_parts(turns)
        if tools and self.tools_in_system:
            turns = forms.tools_in_system(turns, tools)
        text = self._rendered(turns, tools, add_generation_prompt and not continues, variables)
        if continues:
            text, end, _ = text.rpartition(END)
            if not end:
                where = f"messages[{len(messages) - 1}]"
                raise InvalidRequest(f"{where}: the model's chat template cannot end with it", where)
        return text

    @property
    def takes_images(self) -> bool:
        """Whether the template has a place for images of the user."""
        return self._takes(probes.ASKED_IMAGE)

    @property
    def takes_videos(self) -> bool:
        """Whether it has one for videos of the user."""
        return self._takes(probes.ASKED_VIDEO)

    def _takes(self, chat: list[Turn]) -> bool:
        return any(
            self._arrives_with_images(chat, self._chosen(has_tools).reform, has_tools)
            for has_tools in {self._has_tools, False}
        )

    def reformed(
        self, turns: list[Turn], has_tools: bool, variables: Mapping[str, Any], has_images: bool = False
    ) -> list[Turn]:
        """Return the turns in the form in which all of their texts arrive. Raise InvalidRequest if one would not."""
        chosen = self._chosen(has_tools)
        shape = in_words(turns, has_images)
        key: str
        if has_images:
            place = self._places_of_images(has_tools)
            chosen = chosen._replace(reform=forms.after(place, chosen.reform), safe=forms.after(place, chosen.safe))
            key = json.dumps([shape.turns, shape.places, dict(variables)])  # of halves of characters
        else:
            key = msgspec.json.encode([shape.turns, shape.places, dict(variables)]).decode()
        find = self._missing if len(key) <= MAX_KEPT_CHARS else self._find_missing
        missing = find(key, chosen.reform, has_tools)
        if missing is None:
            return chosen.reform(turns)
        if find(key, chosen.safe, has_tools) is None:
            return chosen.safe(turns)
        if isinstance(missing, InvalidRequest):
            return chosen.reform(turns)  # the template says itself what it refuses
        where = f"messages[{missing[0]}].{'content' if missing[1] == 'content' else 'tool_calls'}"
        raise InvalidRequest(f"{where}: the model's chat template would leave it out of the prompt", where)

    def _find_missing(self, key: str, reform: Reform, has_tools: bool) -> InvalidRequest | tuple[int, str] | None:
        has_images = "\\udfff" in key
        turns, places, variables = json.loads(key) if has_images else msgspec.json.decode(key)
        return self._arrival(turns, places, reform, has_tools, variables, has_images=has_images)

    def _rendered(
        self,
        turns: Sequence[Turn],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Return what the template writes, of tools with what it needs of them."""
        try:
            return self._render(turns, tools, add_generation_prompt, variables)
        except InvalidRequest:
            if not tools:
                raise
            filled = forms.tools_filled(tools)
            if filled == list(tools):
                raise
            return self._render(turns, filled, add_generation_prompt, variables)

    # -------------------------------------------------------------------------------------------------------- the forms

    def _choose(self, has_tools: bool) -> _Chosen:
        def add(before: Reform, form: Form, behind: Reform) -> Reform:
            return forms.after(before, self._first(form, before, behind, has_tools))

        written: Reform = unchanged
        for form in probes.WRITTEN:
            written = add(written, form, unchanged)
        calls: Reform = unchanged
        if self._calls is not None and not self._all_arrive(probes.ONE, written, has_tools):
            calls = forms.calls_as_text(functools.partial(text_of_calls, self._calls))
        calls = add(calls, probes.CUT_CALL, written)
        if self._is_kimi:
            calls = forms.after(calls, forms.identified(probes.kimi_id))
        else:
            for form in probes.NAMES:
                calls = add(calls, form, written)
        joins: Reform = unchanged
        for form in probes.JOINS:
            joins = forms.after(joins, self._first(form, calls, forms.after(joins, written), has_tools))
        order = calls
        for form in probes.ORDERS:
            order = add(order, form, forms.after(joins, written))
        reasoning = self._first(probes.REASONING, forms.after(order, joins), written, has_tools)
        behind = forms.after(reasoning, written)
        safe = functools.reduce(forms.after, probes.SAFE, calls)
        several, one = (
            self._arrival_of(chat, forms.after(calls, written), has_tools) for chat in (probes.TWO, probes.ONE)
        )
        takes_only_one = one is None or (isinstance(several, InvalidRequest) and not isinstance(one, InvalidRequest))
        return _Chosen(
            forms.after(forms.after(order, joins), behind),
            forms.after(safe, behind),
            several is None or not takes_only_one,
        )

    def _first(self, form: Form, before: Reform, behind: Reform, has_tools: bool) -> Reform:
        """Return the first form with which the chats arrive; as they are if there is none."""
        for other in (unchanged, *form.others):
            reform = forms.after(forms.after(before, other), behind)
            if all(self._all_arrive(chat, reform, has_tools, form.in_order, form.shows) for chat in form.chats):
                return other
        return unchanged

    def _find_places_of_images(self, has_tools: bool) -> Reform:
        """Return the form in which images of results arrive."""
        reform = self._chosen(has_tools).reform
        has_calls = self._all_arrive(probes.ONE, reform, has_tools)
        chats = probes.READ_IMAGES if has_calls else probes.READ_IMAGES_UNCALLED
        for place in (unchanged, image_turns.moved):
            both = forms.after(place, reform)
            if all(self._arrives_with_images(chat, both, has_tools) for chat in chats):
                return place
        return image_turns.left_out

    def _arrives_with_images(self, chat: list[Turn], reform: Reform, has_tools: bool) -> bool:
        words = in_words(chat, True)
        return self._arrival(words.turns, words.places, reform, has_tools, {}, has_images=True) is None

    def _tell_places(
        self, images: SentImages, given: list[Turn], turns: list[Turn], has_tools: bool, warnings: list[str] | None
    ) -> None:
        """Note the order of the images in the turns, and a warning if those of results are elsewhere."""
        images.place(image_turns.numbers(turns))
        place, found = self._places_of_images(has_tools), image_turns.of_results(given)
        if found and warnings is not None and place is not unchanged:
            where = ", ".join([images.where(i) for i in found[:MAX_NAMED]]) + (", ..." if found[MAX_NAMED:] else "")
            told = OF_NEXT_TURN if place is image_turns.moved else NOT_IN_RESULTS
            warnings.append(f"{where}: {told}")

    def _all_arrive(
        self, chat: list[Turn], reform: Reform, has_tools: bool, in_order: bool = False, shows: str = ""
    ) -> bool:
        return self._arrival_of(chat, reform, has_tools, in_order, shows) is None

    def _arrival_of(
        self, chat: list[Turn], reform: Reform, has_tools: bool, in_order: bool = False, shows: str = ""
    ) -> InvalidRequest | tuple[int, str] | None:
        words = in_words(chat)
        return self._arrival(words.turns, words.places, reform, has_tools, {}, in_order, shows)

    def _arrival(
        self,
        turns: list[Turn],
        places: Sequence[Sequence[Any]],
        reform: Reform,
        has_tools: bool,
        variables: Mapping[str, Any],
        in_order: bool = False,
        shows: str = "",
        has_images: bool = False,
    ) -> InvalidRequest | tuple[int, str] | None:
        """Return the index and key of a text that does not arrive, or why none does; None if all do."""
        formed = reform(turns)
        numbers = image_turns.numbers(formed) if has_images else []
        if has_images:
            formed = image_turns.in_parts(formed)
        try:
            text = self._rendered(formed, [probes.TOOL] if has_tools else None, False, variables)
        except InvalidRequest as error:
            return error
        if numbers and sum([text.count(each) for each in self._placeholders]) != len(numbers):
            with_images = [i for i, turn in enumerate(turns) if image_turns.numbers([turn])]
            return with_images[0], "content"
        found = [(at[0], at.start(), text[at.start() - 1 : at.start()]) for at in probes.WORD.finditer(text)]
        first = {word: at for word, at, _ in reversed(found)}
        in_python = {word for word, _, quote in found if quote == "'"}  # where JSON was to be
        end = 0
        for i, key, word in places:
            if key == "reasoning_content" and key != shows:
                continue  # templates leave out that of earlier turns by design
            at = first.get(word, -1)
            if at < (end if in_order else 0) or (key == probes.ARGUMENT and word in in_python):
                return i, key
            end = at
        return None


class _Chosen(NamedTuple):
    reform: Reform
    safe: Reform
    """For chats that do not arrive in the first."""
    takes_several: bool
