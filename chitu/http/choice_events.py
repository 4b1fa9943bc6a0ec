"""A choice's tokens as they come: as events of a stream (its opening, its deltas, its end, and the usage of each), or
as parts of a whole answer.

Called by the writers of answers (`generate.py`), on the loop thread. Invariant: every token taken from the generation
is in one event or part, or held by the choice's decoder until its text is known.
"""

from __future__ import annotations

from chitu.http.running_answers import Choice
from chitu.http.sampling_fields import OutputOptions
from chitu.http.sse import AnswerFormat, UsageCount


def append_events(
    events: list[bytes], index: int, choice: Choice, form: AnswerFormat, options: OutputOptions, most: int
) -> bool:
    """Append the events that are due for the next `most` tokens of the choice with this index. Return whether its last
    event is among them."""
    generation, decoder = choice.generation, choice.decoder
    reason = generation.finish.reason if generation.finish is not None and len(generation.tokens) <= most else None
    if not generation.tokens and reason is None:
        return False
    logprobs = choice.logprobs
    tokens = generation.take(most)
    if logprobs is not None:
        logprobs.push(tokens, generation.take_logprobs(most))
    deltas = decoder.feed(tokens, reason)
    if not deltas:
        return False
    with_ids, first = options.return_token_ids, len(events)
    sizes = [len(delta.token_ids) for delta in deltas] if options.continuous_usage else []
    if not choice.is_open:
        choice.is_open = True
        events.append(form.opening(index))
        if choice.prompt.echo:
            echoed = None if logprobs is None else b"".join(logprobs.pieces(choice.of_prompt))
            events.append(form.delta(index, choice.prompt.echo, [] if with_ids else None, echoed))
    ending = deltas.pop() if decoder.finish_reason is not None else None
    for delta in deltas:
        numbers = None if logprobs is None else logprobs.of(len(delta.token_ids))
        events.append(form.delta(index, delta.text, delta.token_ids if with_ids else None, numbers))
    if ending is not None and decoder.finish_reason is not None:
        ids = ending.token_ids if with_ids else None
        numbers = b"null" if logprobs is None else logprobs.of(len(ending.token_ids))
        events.append(form.last(index, ending.text, decoder.finish_reason, ids, numbers))
    if sizes:
        # Opening events may precede the deltas.
        for at, size in enumerate([0] * (len(events) - first - len(sizes)) + sizes, first):
            choice.num_shown += size
            if events[at]:
                reasoning = min(choice.num_shown, decoder.num_reasoning_tokens)
                usage = UsageCount(choice.prompt.num_tokens, choice.num_shown, generation.cached_tokens, reasoning)
                events[at] = form.with_usage(events[at], usage)
    return ending is not None


def read_tokens(choice: Choice, most: int | None = None) -> bool:
    """Decode what came for a choice of a whole answer, `most` tokens of it or all. Return whether it is complete."""
    generation, decoder, logprobs = choice.generation, choice.decoder, choice.logprobs
    is_all = most is None or len(generation.tokens) <= most
    reason = generation.finish.reason if generation.finish is not None and is_all else None
    tokens = generation.take(most)
    if logprobs is not None:
        logprobs.push(tokens, generation.take_logprobs(most))
    if reason is not None and not decoder.num_tokens:
        deltas = [decoder.whole(tokens, reason)]
    elif tokens or reason is not None:
        deltas = decoder.feed(tokens, reason)
    else:
        return False
    for delta in deltas:
        choice.texts.append(delta.text)
        choice.token_ids += delta.token_ids
        if logprobs is not None:
            logprobs.show(len(delta.token_ids))
    return decoder.finish_reason is not None
