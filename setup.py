"""Packaging of FlatFSDP: pure Python, nothing is compiled at install time.

The top-level folder `kernels/` is the package `flatfsdp.kernels`, through a link.  On Linux, PyPI's torch is
the build for CUDA; for CPUs install torch first, from https://download.pytorch.org/whl/cpu.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "flatfsdp" / "__init__.py").read_text(), re.MULTILINE)
assert VERSION is not None

# The command `flatfsdp`, examples and benchmarks; typer takes Literals as options since 0.19.
CLI = ["typer>=0.19", "rich>=13.7", "matplotlib>=3.8"]
FABRIC = "lightning-fabric>=2.5"

# Lower bounds are versions with which tests have run; nothing older was tried.
setup(
    name="flatfsdp",
    version=VERSION[1],
    description="An FSDP-integrated flat-parameter engine: gradients land where reduce-scatter reads",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="The FlatFSDP developers",
    keywords=["pytorch", "fsdp", "zero", "fp8", "distributed training", "transformers"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    packages=find_packages(include=["flatfsdp", "flatfsdp.*"]),
    package_data={"flatfsdp": ["py.typed"]},
    entry_points={"console_scripts": ["flatfsdp = flatfsdp.__main__:main"]},
    install_requires=["torch>=2.11,<2.14", "numpy>=1.26"],
    extras_require={
        "cli": CLI,
        "cuda": ["triton>=3.6", "nvmath-python>=1.0"],
        # cuDNN's ordered backward of attention, under torch.use_deterministic_algorithms(True).
        "deterministic": ["nvidia-cudnn-frontend>=1.32"],
        # Hugging Face models and programs with Trainer or Accelerator; PEFT and TRL bring themselves.
        "hf": ["transformers>=5.17,<6", "accelerate>=1.15,<2"],
        "test": [
            *CLI,
            "pytest>=9.2",
            "pytest-timeout>=2.4",
            "pytest-xdist>=3.8",
            "hypothesis>=6.170",
            "ruff>=0.17",
            "mypy>=2.4",
            FABRIC,
        ],
        # The libraries with which tests/ecosystem runs, by exact version: they are what the tests are about.
        # lightning brings a copy of lightning-fabric, in the same place, so both are of one version.
        "ecosystem": [
            'transformers==5.23.0; python_version >= "3.11"',
            'peft==0.21.2; python_version >= "3.11"',
            "accelerate==1.15.0",
            # What TRL brings beside the above; pandas, dill and the like are chosen by these two.
            'trl==1.16.0; python_version >= "3.11"',
            'datasets==5.2.0; python_version >= "3.11"',
            'pyarrow==26.0.1; python_version >= "3.11"',
            "lightning==2.6.6",
            "lightning-fabric==2.6.6",
            "torchdata==0.11.0",
        ],
        # The site of docs/, by `make docs`.
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.8", "mkdocstrings[python]>=1.0", "griffelib>=2.4"],
        "baseline": ["fairscale==0.4.13"],
        "lightning": [FABRIC],
    },
)
