"""Embeddings, scores and rerankings of real clusters against the library's own hidden states and logits, pooled by hand
as sentence-transformers does: last token and mean, over chunks, cached prefixes and token arrays; batches of them."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from nursery import FORKED
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from chitu.config.load import load_topology
from chitu.launch.local import LocalCluster
from chitu.tools.make_model import make_model

pytestmark = pytest.mark.timeout(180)

TEXTS = ["What is the capital of China?", "Beijing.", "Gravity " * 120, "Gravity " * 120 + "pulls", "ünï 😀"]
PROMPTS = {"query": "Instruct: find\nQuery: ", "document": ""}
POOLING, LOGITS = "sentence_transformers.models.Pooling", "sentence_transformers.cross_encoder.modules.LogitScore"
YES, NO = 300, 200


def declare(folder: Path, kind: str, module: dict[str, Any], normalizes: bool = False, **more: Any) -> None:
    types = ["sentence_transformers.models.Transformer", kind]
    types += ["sentence_transformers.models.Normalize"] if normalizes else []
    modules = [{"idx": i, "name": str(i), "path": f"{i}_M" if i else "", "type": each} for i, each in enumerate(types)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_M").mkdir(exist_ok=True)
    (folder / "1_M" / "config.json").write_text(json.dumps(module))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS, **more}))


class Reference:
    """The library's model of the same folder."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

    @torch.no_grad()
    def states(self, text: str | list[int]) -> torch.Tensor:
        """Return the hidden states `[T, D]` behind the final norm."""
        ids = self.tokenizer(text)["input_ids"] if isinstance(text, str) else text
        return self.model.model(torch.tensor([ids])).last_hidden_state[0]

    def last(self, text: str | list[int]) -> torch.Tensor:
        return torch.nn.functional.normalize(self.states(text)[-1], dim=0)

    @torch.no_grad()
    def logits(self, text: str) -> torch.Tensor:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return self.model(torch.tensor([ids])).logits[0, -1]


@contextmanager
def cluster(model: Path, topology: str, *more: str) -> Iterator[str]:
    settings = [f"model.path={model}", "model.served_name=m", "scheduler.chunk_size=64", "scheduler.threads=1", *more]
    with LocalCluster(load_topology(topology, settings), entries=FORKED) as running:
        running.wait_ready()
        yield running.url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny", layers=3, vocab_size=512)


def embedded(url: str, given: Any, **more: Any) -> list[Any]:
    reply = httpx.post(url + "/v1/embeddings", json={"model": "m", "input": given, **more}, timeout=60)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"]
    return [each["embedding"] for each in body["data"]]


def require_close(given: Sequence[Any], wanted: Sequence[torch.Tensor]) -> None:
    """Require equal vectors, up to 1e-5 of the largest number."""
    assert len(given) == len(wanted)
    for one, other in zip(given, wanted, strict=True):
        assert (torch.tensor(one) - other).abs().max() <= 1e-5 * other.abs().max()


def test_last_token_of_p_and_d(folder: Path, tmp_path: Path) -> None:
    declare(folder, POOLING, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, normalizes=True)
    reference = Reference(folder)
    batches = f"dp_config.router.batches.dir={tmp_path}"
    with cluster(folder, "pd_disagg_1p1d_local.yaml", batches) as url:
        wanted = [reference.last(text) for text in TEXTS]
        require_close(embedded(url, TEXTS), wanted)
        require_close(embedded(url, TEXTS), wanted)  # behind cached pages
        require_close(embedded(url, TEXTS[0]), wanted[:1])
        ids = [reference.tokenizer(text)["input_ids"] for text in TEXTS]
        require_close(embedded(url, ids), wanted)
        require_close(embedded(url, ids[0]), wanted[:1])
        cut = [torch.nn.functional.normalize(reference.states(text)[-1][:5], dim=0) for text in TEXTS]
        require_close(embedded(url, TEXTS, dimensions=5), cut)
        raw = embedded(url, TEXTS, encoding_format="base64")
        require_close([np.frombuffer(base64.b64decode(each), "<f4").copy() for each in raw], wanted)
        require_close(embedded(url, TEXTS[3], truncate_prompt_tokens=7), [reference.last(ids[3][:7])])

        # OpenAI's client asks for base64 by itself.
        client = openai.OpenAI(base_url=url + "/v1", api_key="none")
        answer = client.embeddings.create(model="m", input=TEXTS)
        require_close([each.embedding for each in answer.data], wanted)
        assert answer.usage.prompt_tokens == sum(map(len, ids))

        # Scores are cosines, with the prompts that the folder declares.
        query = reference.last(PROMPTS["query"] + TEXTS[0])
        cosines = [float(query @ vector) for vector in wanted]
        body = {"model": "m", "text_1": TEXTS[0], "text_2": TEXTS}
        scores = httpx.post(url + "/v1/score", json=body, timeout=60.0).json()["data"]
        assert [each["score"] for each in scores] == pytest.approx(cosines, abs=1e-5)
        body = {"model": "m", "query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}, TEXTS[4]], "top_n": 2}
        results = httpx.post(url + "/v1/rerank", json=body, timeout=60.0).json()["results"]
        order = sorted([(cosines[1], 0), (cosines[2], 1), (cosines[4], 2)], reverse=True)[:2]
        assert [each["index"] for each in results] == [place for _, place in order]
        assert [each["relevance_score"] for each in results] == pytest.approx([score for score, _ in order], abs=1e-5)
        assert results[0]["document"]["text"] == [TEXTS[1], TEXTS[2], TEXTS[4]][results[0]["index"]]

        # As Cohere's, Jina's and vLLM's clients spell it, at their paths.
        more = {"text": TEXTS[2], "title": "t", "year": 1}
        told = {**body, "documents": [TEXTS[1], more, TEXTS[4]], "truncation": False, "return_documents": True}
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            reply = httpx.post(url + path, json={**told, "max_tokens_per_doc": 4096, "top_n": 0}, timeout=60.0)
            again = reply.json()["results"]
            assert again[:2] == [{**each, "document": again[i]["document"]} for i, each in enumerate(results)]
            assert next(each["document"] for each in again if each["index"] == 1) == more
            assert len(again) == 3 and "x-chitu-warning" not in reply.headers
        cut = reference.tokenizer.decode(reference.tokenizer(TEXTS[2], add_special_tokens=False)["input_ids"][:9])
        few = httpx.post(
            url + "/rerank", json={**body, "documents": [TEXTS[2]], "max_tokens_per_doc": 9}, timeout=60.0
        ).json()
        assert few["results"][0]["relevance_score"] == pytest.approx(float(query @ reference.last(cut)), abs=1e-5)
        assert few["results"][0]["document"]["text"] == TEXTS[2]
        for names in (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")):
            reply = httpx.post(url + "/score", json={"model": "m", names[0]: TEXTS[0], names[1]: TEXTS}, timeout=60.0)
            assert [each["score"] for each in reply.json()["data"]] == pytest.approx(cosines, abs=1e-5)
        long = httpx.post(
            url + "/v2/rerank", json={**body, "documents": ["Gravity " * 9000], "truncation": True}, timeout=60.0
        )
        assert long.status_code == 200, long.text

        for route, wrong, param in (
            ("embeddings", {"input": TEXTS, "dimensions": 10**6}, "dimensions"),
            ("embeddings", {"input": []}, "input"),
            ("embeddings", {"input": [[1, 10**6]]}, "input"),
            ("embeddings", {"input": "x " * 30_000}, None),
            ("embeddings", {"input": "a", "truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens"),
            ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
            ("rerank", {"query": "a", "documents": []}, "documents"),
            ("rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
            ("rerank", {"query": "a", "documents": ["b", {"title": "c"}]}, "documents[1].text"),
            ("rerank", {"query": "a", "documents": [{"text": "b", "image": "data:"}]}, "documents[0].image"),
            ("rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
            ("rerank", {"query": "a", "documents": ["Gravity " * 9000]}, None),
            ("score", {"text_1": "a"}, "text_2"),
            ("score", {"text_1": "a", "queries": "a", "text_2": "b"}, "queries"),
        ):
            reply = httpx.post(f"{url}/v1/{route}", json={"model": "m", **wrong}, timeout=60.0)
            assert reply.status_code == 400, (wrong, reply.text)
            assert reply.json()["error"]["param"] == param or param is None

        # Lines of a batch.
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"input": text}}
            for i, text in enumerate(TEXTS)
        ]
        file = client.files.create(file=("a", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        while (batch := client.batches.retrieve(made.id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing")
        assert batch.output_file_id is not None
        found = {
            int(each["custom_id"]): each["response"]["body"]["data"][0]["embedding"]
            for each in map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
        }
        require_close([found[i] for i in range(len(TEXTS))], wanted)


def without_prefix(source: Path, folder: Path) -> Path:
    """Copy a model with the names that its tensors have if the decoder is saved alone."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("*.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    return folder


def test_mean_of_a_unified_instance_from_a_decoder_that_was_saved_alone(folder: Path, tmp_path: Path) -> None:
    declare(folder, POOLING, {"pooling_mode": "mean", "include_prompt": True})
    reference = Reference(folder)
    with cluster(without_prefix(folder, tmp_path / "alone"), "unified_local.yaml") as url:
        wanted = [reference.states(text).mean(0) for text in TEXTS]
        for _ in range(2):
            require_close(embedded(url, TEXTS), wanted)
        body = {"model": "m", "prompt": TEXTS[2], "max_tokens": 2}
        assert httpx.post(url + "/v1/completions", json=body, timeout=60.0).status_code == 200  # leaves cached pages
        require_close(embedded(url, TEXTS), wanted)


def test_logits_of_a_reranker_on_p_and_d(folder: Path) -> None:
    declare(folder, LOGITS, {"true_token_id": YES, "false_token_id": NO})
    reference = Reference(folder)

    def prompt(query: str, document: str, task: str) -> str:
        system = (
            "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
            'Note that the answer can only be "yes" or "no".'
        )
        user = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        return (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )

    wanted = []
    for text in TEXTS:
        logits = reference.logits(prompt(TEXTS[0], text, "judge"))
        wanted.append(float(torch.softmax(logits[[NO, YES]], 0)[1]))
    with cluster(folder, "pd_disagg_1p1d_local.yaml") as url:
        body = {"model": "m", "query": TEXTS[0], "documents": TEXTS, "instruction": "judge", "return_documents": False}
        results = httpx.post(url + "/v1/rerank", json=body, timeout=60).json()["results"]
        scores = [each["relevance_score"] for each in sorted(results, key=lambda each: each["index"])]
        assert scores == pytest.approx(wanted, abs=1e-5)
        assert [each["relevance_score"] for each in results] == sorted(scores, reverse=True)
        assert "document" not in results[0]
        # A document that is too long is cut at its end, not the words behind it that ask for the answer.
        many = {**body, "documents": [TEXTS[1], "Gravity " * 9000]}
        assert httpx.post(url + "/v1/rerank", json=many, timeout=60).status_code == 400
        reply = httpx.post(url + "/v1/rerank", json={**many, "truncation": True}, timeout=60).json()
        most = httpx.get(url + "/v1/models", timeout=60.0).json()["data"][0]["max_model_len"] - 1

        def count(document: str) -> int:
            return len(reference.tokenizer(prompt(TEXTS[0], document, "judge"), add_special_tokens=False)["input_ids"])

        kept = reply["usage"]["prompt_tokens"] - count(TEXTS[1])
        assert most - 8 <= kept <= most
        about = len("Gravity ") * (kept - count("")) // 6  # each has six tokens
        cut = [text for n in range(about - 20, about + 20) if count(text := ("Gravity " * 9000)[:n]) == kept]
        score = next(each["relevance_score"] for each in reply["results"] if each["index"] == 1)
        scores = [
            float(torch.softmax(reference.logits(prompt(TEXTS[0], text, "judge"))[[NO, YES]], 0)[1]) for text in cut
        ]
        assert any(score == pytest.approx(each, abs=1e-5) for each in scores)
        reply = httpx.post(url + "/v1/embeddings", json={"model": "m", "input": "a"}, timeout=60.0)
        assert reply.status_code == 400 and "LogitScore" in reply.json()["error"]["message"]
