"""The model as the HTTP layer sees it: names, tokenizer, limits. Torch-free.

Loop thread, except what needs no candidates, which any thread may call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chitu.config.schema import ImagesConfig, ModelConfig
from chitu.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from chitu.http.ask.bodies import MAX_TOKENS, ChatBody
from chitu.http.ask.image_files import ImageReader
from chitu.http.ask.images import SentImages, ServedVision
from chitu.http.ask.turns import ChatTurns
from chitu.http.messages.harmony import HarmonyParser
from chitu.http.messages.message_parser import MessageFormat, MessagePlan
from chitu.images.forms import form_of
from chitu.models.config import ModelSpec, read_model_spec
from chitu.models.pooling import read_pooling
from chitu.models.sampling_defaults import read_sampling_defaults
from chitu.protocol import KVLayout, SamplingParams
from chitu.router.candidates import Candidates
from chitu.tokenizer import Tokenizer

NAMED_CHARS = 100
"""Characters of a client's text that an error quotes."""
NAMED_MODELS = 20
"""Most names of models in an error."""


@dataclass(slots=True, frozen=True)
class ModelLimits:
    max_model_len: int
    """Prompt plus output tokens of one request: the least of what the serving instances and the config allow."""
    vocab_size: int


def served_vision(config: ModelConfig, limits: ImagesConfig) -> ServedVision | None:
    """Return what the model in a folder needs of images; None if its prompts have none."""
    form = form_of(config.path) if config.images == "auto" else ""
    return None if isinstance(form, str) else ServedVision(form, limits)


class ServedModel:
    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        spec: ModelSpec,
        created_s: int,
        vision: ServedVision | None = None,
    ) -> None:
        """`vision`: None if the model has none, or is to use none."""
        self.name = config.served_name or Path(config.path).name
        self.path = config.path
        self.adapters = self._first_adapters = dict(config.adapters)
        """Folders of the LoRA adapters that serve, by name: as of `limits`."""
        self.tokenizer = tokenizer
        known = [token for token in tokenizer.eos_token_ids if token < spec.vocab_size]
        self.eos_ids = frozenset(spec.eos_token_ids).union(known)
        """Tokens that end a text unless `ignore_eos`: eos of tokenizer, generation_config.json and config.json."""
        self.tokenizer_eos = tuple(token for token in known if token not in spec.eos_token_ids)
        """Eos ids that only the tokenizer has. D cannot find them by itself, as it reads no tokenizer."""
        self._spec_vocab_size = spec.vocab_size
        self.hidden_size = spec.hidden_size
        self.sampling_defaults = read_sampling_defaults(config)
        self.pooling = read_pooling(Path(config.path))
        """What the folder declares for embeddings and scores, or why it cannot be served."""
        self.message_format = MessageFormat.of(tokenizer.template_source)
        self.turns = ChatTurns(
            *(tokenizer.apply_chat_template, tokenizer.template_source, tokenizer.template_variables),
            self.message_format.calls,
            *(vision.placeholders if vision is not None else ()),
        )
        self._vision = vision
        self._takes_images: bool | None = None
        """Whether the chat template has a place for images; None until a chat has some."""
        self.created_s = created_s
        self._config_max_len = config.max_model_len
        self._limits: tuple[Candidates, ModelLimits] | None = None
        self.layout: KVLayout | None = None
        """Layout of an instance that served when `limits` was last computed; all instances have the same model."""

    @classmethod
    def load(cls, config: ModelConfig, created_s: int, images: ImagesConfig | None = None) -> ServedModel:
        """Load the model's tokenizer and spec. `images`: limits on images; None: no request may have any. ConfigError
        if the folder is missing or not a model."""
        spec = read_model_spec(config.path, config.max_model_len, config.code)
        vision = None if images is None else served_vision(config, images)
        return cls(config, Tokenizer.load(config.path), spec, created_s, vision)

    def adapter_of(self, name: str | None) -> str:
        """Return the LoRA adapter of this name, or "" for the model alone: its served name, its path, or None. Raises
        ModelNotFound for any other name."""
        if name is None or name == self.name or name == self.path:
            return ""
        if name not in self.adapters:
            known = ", ".join(map(repr, [self.name, *self.adapters][:NAMED_MODELS]))
            raise ModelNotFound(f"the model {name[:NAMED_CHARS]!r} does not exist; this server has {known}")
        return name

    def stop_ids_of(self, sampling: SamplingParams) -> frozenset[int]:
        """Return eos and the request's stop ids."""
        return self.eos_ids.union(sampling.stop_token_ids) if sampling.stop_token_ids else self.eos_ids

    def ends_of(self, sampling: SamplingParams) -> frozenset[int]:
        """Return the ids of `stop_ids_of` that end the request's text: without eos if it ignores eos."""
        return frozenset(sampling.stop_token_ids) if sampling.ignore_eos else self.stop_ids_of(sampling)

    def limits(self, candidates: Candidates) -> ModelLimits | None:
        """Return the limits of a request; None while no instance can serve. Computed once per view, as are the adapters
        and the layout."""
        if self._limits is None or self._limits[0] is not candidates:
            serving = candidates.serving
            if not serving:
                return None
            max_len = min(instance.max_model_len for instance in serving)
            if self._config_max_len is not None:
                max_len = min(max_len, self._config_max_len)
            self._limits = candidates, ModelLimits(max_len, min(i.layout.vocab_size for i in serving))
            newest = max(serving, key=lambda instance: instance.weights.age)
            self.layout, listed = newest.served_layout, newest.weights.adapters
            self.adapters = self._first_adapters if listed is None else {each.name: each.path for each in listed}
        return self._limits[1]

    def vocab_size(self, candidates: Candidates) -> int:
        """Return the vocabulary size of the serving instances, or of the checkpoint while there is none."""
        limits = self.limits(candidates)
        return limits.vocab_size if limits is not None else self._spec_vocab_size

    def encode(self, text: str, add_special_tokens: bool, limits: ModelLimits) -> list[int]:
        """Return the text's token ids. ContextLengthExceeded, without tokenising, if they are certainly more than a
        request may have; otherwise the caller counts them."""
        if self.tokenizer.exceeds(text, limits.max_model_len):
            raise ContextLengthExceeded(
                f"this model's maximum context length is {limits.max_model_len} tokens and a prompt of {len(text)} "
                "characters has more; shorten the prompt"
            )
        return self.tokenizer.encode(text, add_special_tokens)

    def encode_to_cut(self, text: str, add_special_tokens: bool, limits: ModelLimits) -> list[int]:
        """Return token ids as `encode` does, for a text of which only the end is used. It may have more tokens than a
        request; ContextLengthExceeded beyond what `/tokenize` takes."""
        most = max(limits.max_model_len, MAX_TOKENS)
        if self.tokenizer.exceeds(text, most, bytes_per_token=1):
            raise ContextLengthExceeded(f"a prompt of {len(text)} characters has more than {most} tokens; shorten it")
        return self.tokenizer.encode(text, add_special_tokens)

    def encode_counted(
        self,
        text: str,
        add_special_tokens: bool,
        param: str,
        limits: ModelLimits | None,
        require_client: Callable[[], None],
    ) -> list[int]:
        """Return the ids of a text that is only to be counted, also if it is longer than a request may be, or nothing
        serves. InvalidRequest, which names `param`, beyond `MAX_TOKENS`. Calls `require_client` ahead of the costly
        part."""
        most = max(limits.max_model_len if limits is not None else 0, MAX_TOKENS)
        if self.tokenizer.exceeds(text, most, bytes_per_token=1):
            raise InvalidRequest(f"{param}: at most {most} tokens are counted", param)
        require_client()
        return self.tokenizer.encode(text, add_special_tokens)

    def num_added_tokens(self, ids: Sequence[int]) -> int:
        """Return how many of the first ids are those that begin every text (bos)."""
        head = self.tokenizer.encode("", True)
        return len(head) if list(ids[: len(head)]) == head else 0

    def last_tokens(self, ids: Sequence[int], most: int, has_special_tokens: bool) -> list[int]:
        """Return the last `most` ids (`most` at least 1). With special tokens, the result begins with those that begin
        every text (bos), if there is room for more than these."""
        head = self.tokenizer.encode("", True) if has_special_tokens else []
        if len(head) < most and list(ids[: len(head)]) == head:
            return [*head, *ids[len(ids) - (most - len(head)) :]]
        return list(ids[-most:])

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any],
        warnings: list[str],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continues: bool = False,
        images: SentImages | None = None,
    ) -> str:
        """Return a chat as text; if it `continues`, it ends with its last message. InvalidRequest if the template
        refuses it. Variables that the template does not read are added to `warnings`. `images`: those of the marks in
        the content."""
        unread = sorted(variables.keys() - self.tokenizer.template_variables)
        if unread:
            names = ", ".join(unread)[:NAMED_CHARS]
            warnings.append(f"chat_template_kwargs: the model's chat template does not read {names}")
        if not images:
            return self.turns.prompt(messages, tools, variables, add_generation_prompt, continues)
        text = self.turns.prompt(messages, tools, variables, add_generation_prompt, continues, images, warnings)
        return images.written(text, messages)

    @property
    def has_vision(self) -> bool:
        """Whether bodies may have images."""
        return self._vision is not None

    @property
    def vision(self) -> ServedVision | None:
        """What the model needs of images; None if it sees none."""
        if self._vision is not None and self._takes_images is None:
            self._takes_images = self.turns.takes_images
            if self._takes_images and not isinstance(self._vision.form.video, str) and not self.turns.takes_videos:
                self._vision.form = self._vision.form._replace(video="its chat template has no place for them")
        return self._vision if self._takes_images else None

    def set_reader(self, reader: ImageReader) -> None:
        """Have this process read the files of images."""
        if self._vision is not None:
            self._vision.reader = reader

    def message_plan(self, body: ChatBody, prompt: str, tools: Sequence[dict[str, Any]] | None) -> MessagePlan | None:
        """Return how to parse the answer to a rendered chat; None if all of it is content. `tools`: the offered tools.
        InvalidRequest for tools if this model's calls cannot be told from text."""
        calls, marks = (
            self.message_format if body.separate_reasoning is not False else (self.message_format.calls, None)
        )
        if not tools:
            reads_all = calls is not None and calls.marks_text and (calls is not HarmonyParser or marks is not None)
            calls = calls if reads_all else None
        elif "tools" not in self.tokenizer.template_variables and not self.turns.tools_in_system:
            raise InvalidRequest(
                "tools: the model's chat template shows the model no tools; a chat_template.jinja in its folder that "
                "does replaces it",
                "tools",
            )
        elif calls is None:
            raise InvalidRequest(
                "tools: the model's chat template calls them in an unknown format (known: Hermes, Qwen, Qwen3-Coder, "
                "GLM-4.5, MiniMax-M1 and M2, Kimi-K2, DeepSeek, gpt-oss, Llama 3 and 4, Mistral, Gemma 3 and 4, "
                "Granite, Phi-4-mini, Command, Apertus, LFM2, Seed-OSS, Nemotron, Apriel)",
                "tools",
            )
        if calls is None and marks is None:
            return None
        return MessagePlan(
            calls=calls,
            names={tool["function"]["name"]: tool["function"].get("parameters") for tool in tools or ()},
            is_parallel=body.parallel_tool_calls is not False and self.turns.takes_several_calls,
            reasoning=marks,
            is_reasoning=marks is not None and prompt.rstrip().endswith(marks.open),
            shows_reasoning=body.include_reasoning is not False,
        )

    def may_skip_special(self, plan: MessagePlan) -> bool:
        """Return whether the plan finds its marks in a text without special tokens."""
        return self.tokenizer.special_token_ids.keys().isdisjoint(plan.marks())

    def require_known(self, ids: Sequence[int], limits: ModelLimits, param: str, is_text: bool) -> None:
        """Raise InvalidRequest if the model has no embedding for one of the ids (not empty). That may happen with a
        tokenizer's ids too: it may have tokens that were added beyond the model's vocabulary."""
        if is_text and self.tokenizer.vocab_size <= limits.vocab_size:
            return
        largest = max(ids)
        if largest < limits.vocab_size and min(ids) >= 0:
            return
        known = f"from 0 to {limits.vocab_size - 1}"
        if is_text:
            token = self.tokenizer.decode([largest], skip_special_tokens=False)
            raise InvalidRequest(f"{param}: the text has the token {token!r} ({largest}); the model has {known}", param)
        raise InvalidRequest(f"{param}: token ids must be {known}", param)
