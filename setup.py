"""Packaging of curvadion; pyproject.toml holds the build requirements and the tools' settings."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
TRAIN = ["tqdm", "tensorboard", "matplotlib"]
TEST = ["pytest", "pytest-timeout", "hypothesis", "mypy", "ruff", *TRAIN]


def version() -> str:
    """Return ``curvadion.__version__`` without importing the package, which would need torch."""
    source = (ROOT / "curvadion" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('curvadion/__init__.py has no line of the form __version__ = "1.2.3"')
    return match[1]


def long_description() -> str:
    """Return the README, or nothing in a tree without one."""
    readme = ROOT / "README.md"
    return readme.read_text() if readme.exists() else ""


packages = find_packages(include=["curvadion", "curvadion.*"])
package_dir = {"curvadion": "curvadion"}
# The kernels live one folder down: a root package named "kernels" would shadow Hugging Face's.
if (ROOT / "kernels").is_dir():
    packages += find_packages("kernels")
    package_dir["curvadion_kernels"] = "kernels/curvadion_kernels"

setup(
    name="curvadion",
    version=version(),
    description="Low-rank distributed optimizers that synchronise only when curvature asks for it",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    packages=packages,
    package_dir=package_dir,
    package_data={package: ["py.typed"] for package in package_dir},
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "numpy"],
    extras_require={
        "triton": ["triton"],
        "deepspeed": ["deepspeed"],
        "train": TRAIN,
        "test": TEST,
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
