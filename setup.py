"""Package metadata and dependencies; every tool's settings are in pyproject.toml.

The distribution is `chitu-pd`, since the package index has another project called `chitu`. What is imported, and the
command, are `chitu`.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="chitu-pd",
    version=re.findall(r'__version__ = "(.+)"', (ROOT / "chitu/__init__.py").read_text())[0],
    description="Prefill/decode disaggregated LLM serving",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11,<3.15",
    packages=find_packages(include=["chitu", "chitu.*"]),
    package_data={
        "chitu": ["py.typed"],
        "chitu.assets": ["chitu-tiny/*"],
        "chitu.config": ["*.yaml"],
        "chitu.ops": ["*.c"],
        "chitu.http.fleet": ["web/*"],
    },
    install_requires=[
        "torch>=2.9",
        "transformers>=4.57",  # 5.23 for models that our own code does not compute (chitu/models/generic)
        "safetensors>=0.6",
        "tokenizers>=0.22",
        "jinja2>=3.1",
        "llguidance>=1.9,<2",
        "numpy>=2.0",
        "pillow>=11",  # images of requests, in processes of their own (chitu/images)
        "pyzmq>=26",
        "msgspec>=0.19",
        "pyyaml>=6",
        "fastapi>=0.115",
        "uvicorn>=0.34",
        "uvloop>=0.21",
        "httptools>=0.6",
        "rich>=13",
        "prometheus-client>=0.21",
    ],
    extras_require={
        "mooncake": ["mooncake-transfer-engine-non-cuda>=0.3.13"],
        "mooncake-cuda12": ["mooncake-transfer-engine>=0.3.13"],
        "mooncake-cuda13": ["mooncake-transfer-engine-cuda13>=0.3.13"],
        "nixl": ["nixl-cu13>=1.5"],
        "nixl-cuda12": ["nixl-cu12>=1.5"],
        "video": ["av>=14"],  # MP4 and WEBM files of requests; lists of frames and animations need none
        "gpu": ["triton>=3.5"],
        "otel": ["opentelemetry-sdk>=1.27", "opentelemetry-exporter-otlp-proto-http>=1.27"],
        "train": ["matplotlib>=3.8"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "mypy>=1.14",
            "import-linter>=2.1",
            "types-PyYAML",
            "httpx>=0.27",
            "openai>=2",
            "msgpack>=1.1",
            "psutil>=6",
            "av>=14",
            "playwright>=1.50",
            "schemathesis>=4",
            "triton>=3.5; platform_system == 'Linux'",
            "setuptools>=70.1",
            "opentelemetry-sdk>=1.27",
            "opentelemetry-exporter-otlp-proto-http>=1.27",
            # For deploy/: Helm's own library, Kubernetes' schemas, those of compose files.
            "helm-python-sdk>=0.2.2",
            "kubernetes-validate>=1.37",
            "compose-spec>=0.2.1",
        ],
    },
    entry_points={"console_scripts": ["chitu=chitu.cli:main"]},
)
