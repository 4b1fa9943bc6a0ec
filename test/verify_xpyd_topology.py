"""Prove from the outside that every P, D and pair of a running cluster takes part and gives right answers.

    python test/verify_xpyd_topology.py --router http://HOST:21003 --model M --concurrency 6 --max_tokens 64 --stream

Sends rounds of one prompt each, two requests per pair, until every pair was hit; each answer names the pair that served
it (`return_proof`). Then it requires that every instance of the topology is up and had requests; that every pair had
requests; that every request id is unique; that P moved as many bytes as the pages and the logits row of the prompt have
(the prefix cache is not used); that the checksums of these pages are the same on P and on D (`return_page_sums`); that
D refused nothing; that all answers to one prompt (greedy) have the same tokens, up to near-ties; and that the logprobs
of two pairs differ by no more than rounding explains, as two answers of one pair show it. Works with any model
and any topology that has pairs. Prints a table for people, `--json` for machines. Exit code 0, or 1 with the reasons,
or 2 for wrong arguments. Any Python will do: the script switches to the project's.

Needs a router that pairs evenly enough: `round_robin` hits every pair in the first round, other policies take more. The
checks are in `chitu/tools/verify/`, and so is `chitu verify`, which checks more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

try:
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from chitu.config.load import api_key
    from chitu.errors import ChituError
    from chitu.launch.router_client import RouterClient
    from chitu.tools.verify.probe import CheckedRequest, Impossible, Pair, Prober
    from chitu.tools.verify.topology import MIN_ROUNDS, TopologyVerdict, judge, pairs_among
except ImportError as missing:  # not the project's Python
    own = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "python"
    if own.is_file() and os.path.abspath(sys.executable) != str(own):
        os.execv(own, [str(own), *sys.argv])
    sys.exit(f"{sys.executable} does not have what this needs ({missing}): script/setup.sh makes {own}, which does")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--router", default="http://127.0.0.1:21003", metavar="URL")
    parser.add_argument("--model", help="as in the API (default: the one that is served)")
    parser.add_argument("--concurrency", type=int, default=6, help="requests at once")
    parser.add_argument("--max_tokens", "--max-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--stream", action="store_true", help="ask for streams of tokens")
    parser.add_argument("--rounds", type=int, default=12, help="prompts at most, until every pair was hit")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one answer")
    parser.add_argument("--api-key", default=api_key(), help="default: CHITU_API_KEY, which `ps` does not show")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    if min(args.concurrency, args.max_tokens, args.rounds) < 1:
        parser.error("--concurrency, --max_tokens and --rounds are at least 1")
    try:
        client = RouterClient(args.router, args.api_key, flag="--router")
        model = args.model or client.model_name()
        prober = Prober(client, model, args.max_tokens, args.timeout)
        verdict = probe(prober, args.stream, args.concurrency, max(args.rounds, MIN_ROUNDS))
    except ChituError as error:
        return _refuse(args.json, error.message)
    if args.json:
        print(msgspec.json.encode(verdict).decode())
    else:
        show(verdict, Console(width=None if sys.stdout.isatty() else 120))
    return 0 if verdict.ok else 1


def probe(prober: Prober, stream: bool, concurrency: int, max_rounds: int) -> TopologyVerdict:
    """Send requests until every pair was hit, and judge. Raise Impossible without pairs, ChituError without a
    router."""
    before = prober.client.cluster()
    roles = {role: [i for i in before.instances if i.role == role] for role in ("prefill", "decode", "unified")}
    if not roles["prefill"] and not roles["decode"]:
        names = ", ".join(i.name for i in roles["unified"])
        raise Impossible(f"this cluster has no pairs of P and D to check, only unified instances: {names or 'none'}")
    wanted: set[Pair] = set(pairs_among([one for one in before.instances if one.status == "up"]))
    asked: list[CheckedRequest] = []
    if wanted and before.max_model_len is not None:
        with ThreadPoolExecutor(concurrency) as pool:
            for number in range(max_rounds):
                prompt = prober.fitting_prompt(number, before.max_model_len)
                ask = partial(prober.ask, number, prompt, stream, logprobs=0, return_page_sums=True)
                sent = [pool.submit(ask) for _ in range(2 * len(wanted))]  # two of a pair show what rounding does
                asked += [one.result() for one in sent]
                if number + 1 >= MIN_ROUNDS and wanted <= {one.pair for one in asked}:
                    break
    return judge(before, prober.client.cluster(), asked)


def show(verdict: TopologyVerdict, console: Console) -> None:
    table = Table(title=f"{verdict.model}: {verdict.requests} requests, {verdict.prompts} prompts")
    for name in ("pair", "requests", "prompt tokens", "bytes moved", "formula", "tokens", "TTFT ms"):
        table.add_column(name, justify="left" if name == "pair" else "right")
    for pair in verdict.pairs:
        name, tokens = f"{pair.prefill}-{pair.decode}", "equal" if pair.tokens_equal else "DIFFERENT"
        if pair.requests:
            row = (pair.requests, pair.prompt_tokens, pair.kv_bytes, pair.expected_bytes, tokens, pair.ttft_ms)
            table.add_row(name, *map(str, row))
        else:
            table.add_row(name, "0", *["-"] * 5)
    console.print(table)
    console.print("requests by instance: " + ", ".join(f"{name} {n}" for name, n in verdict.instances.items()))
    hit = sum(pair.requests > 0 for pair in verdict.pairs)
    if verdict.ok:
        console.print(f"ok: {hit} of {len(verdict.pairs)} pairs took part, bytes, checksums and tokens are right")
    for reason in verdict.reasons:
        console.print(f"FAILED: {reason}", markup=False, soft_wrap=True)


def _refuse(as_json: bool, reason: str) -> int:
    print(json.dumps({"ok": False, "reasons": [reason]}) if as_json else f"FAILED: {reason}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
