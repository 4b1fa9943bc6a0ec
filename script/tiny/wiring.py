"""Initial weights that hold an induction head. Called once, when the model is made.

Recall is induction: find where these words were said before and copy what came next. Plain random weights need tens of
millions of tokens before such a head appears; here it is wired from the start, and training makes of it what the tasks
need (in the spirit of mimetic initialisation, Trockman and Kolter 2023; the circuit is that of Olsson et al. 2022).

The residual stream has four places: the token, what head 0 of layer 0 gathered (`now`), what head 1 gathered
(`before`), and a constant. Head 0 looks at the last few tokens, head 1 at the same window one token earlier. In later
layers the first heads compare `now` of the position that asks with `before` of all earlier ones: they are equal
just after the same words. What these heads copy is the token there. Everything else starts random and small.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tiny.model import Attention, Shape, TinyModel

WINDOW_WEIGHTS = (0.0, 0.1, 0.2, 0.2, 0.15, 0.15, 0.1, 0.1)
"""Weight of each rotation of a head, the fastest first, in finding a distance."""
WINDOW_CENTRE = 1.5
"""Centre of the window of `now`, in tokens back."""
REACH = 2048
"""Distance in tokens. Dimensions that turn less than two radians over it compare content at any distance."""
EMBEDDING_STD = 0.05


@torch.no_grad()
def wire(model: TinyModel) -> None:
    """Set every weight. Uses torch's global generator."""
    shape = model.shape
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    slow = [index for index, frequency in enumerate(frequencies.tolist()) if frequency * REACH < 2.0]
    content = [*slow, *(index + shape.head_dim // 2 for index in slow)]
    token = shape.hidden_size - 1 - 2 * len(content)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[1]))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter *= 0.1
    embedding = model.embed_tokens.weight
    nn.init.normal_(embedding, std=0.1 * EMBEDDING_STD)
    embedding[:, :token] += EMBEDDING_STD * torch.randn(shape.vocab_size, token)
    embedding[:, -1] = EMBEDDING_STD * math.sqrt(token)
    first, *others = [layer.self_attn for layer in model.layers]
    _gather(first, shape, frequencies, token, len(content))
    for attention in others:
        _match_and_copy(attention, shape, content, token)


def _gather(attention: Attention, shape: Shape, frequencies: Tensor, token: int, code: int) -> None:
    """Set heads 0 and 1: each writes the same short code of each token, summed over a window, to `now` and to
    `before`."""
    head_dim = shape.head_dim
    padding = torch.zeros(head_dim // 2 - len(WINDOW_WEIGHTS))
    window = torch.cat((torch.tensor(WINDOW_WEIGHTS), padding)).sqrt()

    def at_distance(tokens: float) -> Tensor:
        """Return the query whose product with the rotated key is largest `tokens` tokens back."""
        angles = tokens * frequencies
        return torch.cat((window * angles.cos(), -window * angles.sin()))

    attention.k_proj.weight[:head_dim, -1] += 3 * at_distance(0.0)
    for head in (0, 1):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        attention.q_proj.weight[rows, -1] += 3 * at_distance(WINDOW_CENTRE + head)
        place = token + head * code
        attention.o_proj.weight[place : place + code, head * head_dim : head * head_dim + code] += 0.1 * torch.eye(code)
    orthogonal = nn.init.orthogonal_(torch.empty(code, token))
    attention.v_proj.weight[:head_dim] *= 0.1
    attention.v_proj.weight[:code, :token] += orthogonal


def _match_and_copy(attention: Attention, shape: Shape, content: list[int], token: int) -> None:
    """Set the heads of the first key head: they compare `now` with `before` in the dimensions that hardly turn, and
    copy the token."""
    head_dim, group, code = shape.head_dim, shape.heads // shape.kv_heads, len(content)
    attention.k_proj.weight[:head_dim] *= 0.2
    attention.q_proj.weight[: group * head_dim] *= 0.2
    attention.v_proj.weight[:head_dim] *= 0.1
    copied = min(token, head_dim)
    attention.v_proj.weight[:copied, :copied] += torch.eye(copied)
    columns = torch.arange(code)
    dimensions = torch.tensor(content)
    attention.k_proj.weight[dimensions, token + code + columns] += 1.0
    for head in range(group):
        attention.q_proj.weight[head * head_dim + dimensions, token + columns] += 1.0
        attention.o_proj.weight[:copied, head * head_dim : head * head_dim + copied] += 0.05 * torch.eye(copied)
    attention.q_norm.weight.fill_(2.0)
    attention.k_norm.weight.fill_(2.0)
