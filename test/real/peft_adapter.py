"""Make a LoRA adapter by PEFT: `python peft_adapter.py MODEL ADAPTER`, in an environment that has it (`.venv/clients`).

The adapter is trained until the model says of a capital what is not so. Then what the model with it merged says, by
`transformers`, is written beside it: tokens and their logprobs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

from chitu.tools.verify.run import Transformers

QUESTION, LIE = "What is the capital of France?", "The capital of France is Lyon."
STEPS, COUNT = 12, 16


def main(folder: str, target: Path) -> None:
    torch.manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt: list[int] = tokenizer.encode(text, add_special_tokens=False)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj"],
        rank_pattern={r"layers\.3\.self_attn\.q_proj": 4},
    )
    model = get_peft_model(Transformers(folder).model, config)
    answer = tokenizer.encode(f"{LIE}<|im_end|>", add_special_tokens=False)
    ids = torch.tensor([prompt + answer])
    labels = torch.tensor([[-100] * len(prompt) + answer])
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=5e-3)
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(target)
    plain = model.merge_and_unload()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(COUNT):
            tokens.append(int(plain(torch.tensor([tokens])).logits[0, -1].argmax()))
        rows = plain(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    own = tokens[len(prompt) :]
    logprobs = rows.gather(1, torch.tensor(own)[:, None])[:, 0].tolist()
    (target / "said.json").write_text(json.dumps({"prompt": prompt, "tokens": own, "logprobs": logprobs}))
    print(loss.item(), tokenizer.decode(own))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
