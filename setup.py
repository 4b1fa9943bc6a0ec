"""Package metadata and dependencies; every tool's settings are in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="chitu",
    version="0.1.0",
    description="Prefill/decode disaggregated LLM serving",
    license="MIT",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["chitu", "chitu.*"]),
    package_data={"chitu.config": ["*.yaml"], "chitu.ops": ["*.c"], "chitu": ["py.typed"]},
    install_requires=[
        "torch>=2.9",
        "transformers>=4.57",
        "safetensors>=0.6",
        "tokenizers>=0.22",
        "jinja2>=3.1",
        "numpy>=2.0",
        "pyzmq>=26",
        "msgspec>=0.19",
        "pyyaml>=6",
        "fastapi>=0.115",
        "uvicorn>=0.34",
        "uvloop>=0.21",
        "httptools>=0.6",
        "rich>=13",
    ],
    extras_require={
        "mooncake": ["mooncake-transfer-engine-non-cuda>=0.3.13"],
        "mooncake-cuda12": ["mooncake-transfer-engine>=0.3.13"],
        "mooncake-cuda13": ["mooncake-transfer-engine-cuda13>=0.3.13"],
        "nixl": ["nixl>=1.5"],
        "gpu": ["triton>=3.5"],
        "dev": [
            "pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.100", "ruff>=0.9", "mypy>=1.14", "import-linter>=2.1",
            "types-PyYAML", "httpx>=0.27", "openai>=1.60", "msgpack>=1.1", "psutil>=6",
        ],
    },
    entry_points={"console_scripts": ["chitu=chitu.cli:main"]},
)
