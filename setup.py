"""Packaging of curvadion; pyproject.toml holds the build requirements and the tools' settings.

A wheel is pure: it holds the sources of the compiled operations, and their first use compiles them.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
TRITON = ["triton; platform_system == 'Linux'"]
TRAIN = ["tqdm", "tensorboard", "matplotlib"]
DOCS = ["mkdocs-material", "mkdocstrings[python]"]
RUNNER = ["pytest", "pytest-timeout", "pytest-xdist"]
HUGGINGFACE = ["transformers", "accelerate"]
LIGHTNING = ["lightning"]
TORCHFT = ["torchft>=0.2,<0.3"]
TORCHTITAN = ["torchtitan>=0.3,<0.4; python_version >= '3.11'"]
# With which integrations are tested; requirements-torchtitan.txt has torchtitan.
FRAMEWORKS = [*HUGGINGFACE, *LIGHTNING, *TORCHFT]
TEST = [*RUNNER, "hypothesis", "mypy", "ruff", *TRAIN, *TRITON]


def version() -> str:
    """Return ``curvadion.__version__`` without importing the package, which would need torch."""
    source = (ROOT / "curvadion" / "__init__.py").read_text("utf-8")
    match = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('curvadion/__init__.py has no line of the form __version__ = "1.2.3"')
    return match[1]


def long_description() -> str:
    """Return the README for a page elsewhere, or nothing in a tree without one.

    Links to files beside it become plain text, and pictures are left out.
    """
    readme = ROOT / "README.md"
    if not readme.exists():
        return ""
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", readme.read_text("utf-8"), flags=re.M)
    return re.sub(r"\[([^]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


class BuildPackages(build_py):
    """Take the sources along, so that an installed package can compile what is missing."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "curvadion" / "csrc"
            shutil.copytree(ROOT / "csrc", target, dirs_exist_ok=True)


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
    project_urls={
        "Dion (paper)": "https://arxiv.org/abs/2504.05295",
        "CurvaDion (paper)": "https://arxiv.org/abs/2512.13728",
    },
    license="MIT",
    license_files=["LICENSE"],
    packages=packages,
    package_dir=package_dir,
    cmdclass={"build_py": BuildPackages},
    package_data={package: ["py.typed"] for package in package_dir},
    python_requires=">=3.10",
    install_requires=["torch>=2.11,<2.16", "numpy", "ninja"],
    extras_require={
        "triton": TRITON,
        "deepspeed": ["deepspeed"],
        "huggingface": HUGGINGFACE,
        "lightning": LIGHTNING,
        "torchft": TORCHFT,
        "torchtitan": TORCHTITAN,
        "train": TRAIN,
        "wandb": ["wandb"],
        "docs": DOCS,
        "test": TEST,
        "test-frameworks": FRAMEWORKS,
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
