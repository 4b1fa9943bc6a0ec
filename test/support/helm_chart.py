"""The manifests of `deploy/helm/chitu`, rendered by Helm's own library as `helm template` does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "chitu"
RELEASE, NAMESPACE = "serve", "llm"


def helm() -> Any:
    """Return Helm's library; skip the test if it is missing, and fail it in CI."""
    try:
        import helm_python  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        assert "CI" not in os.environ, "script/setup.sh --dev could not get helm-python-sdk"
        pytest.skip("helm-python-sdk is not there: script/setup.sh --dev")
    return helm_python


def rendered(**values: Any) -> list[dict[str, Any]]:
    """Return what an installation of release `serve` in namespace `llm` would create. Raise HelmError for values that
    the chart does not take."""
    with helm().Chart.load(CHART) as chart:
        chart.validate_schema(values)
        texts = chart.render(values=values, name=RELEASE, namespace=NAMESPACE)
    manifests = [text for path, text in texts.items() if path.endswith(".yaml")]
    return [one for text in manifests for one in yaml.safe_load_all(text) if one]
