"""Packaging of curvadion; pyproject.toml holds the build requirements and the tools' settings.

A wheel is pure: it holds the sources of the compiled operations, and their first use compiles them.
``CURVADION_COMPILE=1 pip wheel .`` compiles them into the wheel, which then is for this platform.
"""

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PROJECT = "https://pypi.org/project/curvadion/"
COMPILE = os.environ.get("CURVADION_COMPILE", "0") not in ("", "0")
TRITON = ["triton; platform_system == 'Linux'"]
TRAIN = ["tqdm", "tensorboard", "matplotlib"]
DOCS = ["mkdocs-material", "mkdocstrings[python]"]
RUNNER = ["pytest", "pytest-timeout", "pytest-xdist"]
FRAMEWORKS = ["transformers", "accelerate", "lightning"]  # with which integrations are tested
TEST = [*RUNNER, "hypothesis", "mypy", "ruff", "ninja", *TRAIN, *TRITON]


def version() -> str:
    """Return ``curvadion.__version__`` without importing the package, which would need torch."""
    source = (ROOT / "curvadion" / "__init__.py").read_text("utf-8")
    match = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    if match is None:
        raise RuntimeError('curvadion/__init__.py has no line of the form __version__ = "1.2.3"')
    return match[1]


def long_description() -> str:
    """Return the README for a page elsewhere, or nothing in a tree without one.

    Files beside it are in the source archive: links to them lead there, and pictures are left out.
    """
    readme = ROOT / "README.md"
    if not readme.exists():
        return ""
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n*", "", readme.read_text("utf-8"), flags=re.M)
    return re.sub(r"\]\((?!https?:|#)[^)]*\)", f"]({PROJECT}#files)", text)


def native_builder():
    """Return the module curvadion.ops.native, without importing the package around it."""
    spec = importlib.util.spec_from_file_location(
        "native", ROOT / "curvadion" / "ops" / "native.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["native"] = module
    spec.loader.exec_module(module)
    return module


class BuildLibraries(build_ext):
    """Compile csrc/ where this is asked for; what cannot be compiled is left to its first use."""

    def run(self):
        native = native_builder()
        folder = ROOT if self.inplace else Path(self.build_lib)
        self.built = []
        for name in () if self.editable_mode else ("cpu", "cuda"):
            target = folder / "curvadion" / native.file_name(name)
            try:
                native.build(name, target)
            except native.Unavailable as reason:
                if COMPILE and name == "cpu":
                    raise SystemExit(f"CURVADION_COMPILE is set, but {reason}") from reason
                print(f"curvadion: the {name} operations are not built: {reason}")
            else:
                self.built += [str(target), str(native.checksum_file(target))]

    def get_outputs(self):
        return getattr(self, "built", [])

    def get_output_mapping(self):
        return {}


class BuildPackages(build_py):
    """Take the sources along, so that an installed package can compile what is missing."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "curvadion" / "csrc"
            shutil.copytree(ROOT / "csrc", target, dirs_exist_ok=True)


class Wheel(bdist_wheel):
    """For every Python, also with compiled libraries: they do not link it."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


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
    url=PROJECT,
    project_urls={
        "Source archive": f"{PROJECT}#files",
        "Dion (paper)": "https://arxiv.org/abs/2504.05295",
        "CurvaDion (paper)": "https://arxiv.org/abs/2512.13728",
    },
    license="MIT",
    license_files=["LICENSE"],
    packages=packages,
    package_dir=package_dir,
    ext_modules=[Extension("curvadion.libraries", [])] if COMPILE else [],
    cmdclass={"build_ext": BuildLibraries, "build_py": BuildPackages, "bdist_wheel": Wheel},
    package_data={package: ["py.typed"] for package in package_dir},
    python_requires=">=3.10",
    install_requires=["torch>=2.11,<2.16", "numpy"],
    extras_require={
        "triton": TRITON,
        "deepspeed": ["deepspeed"],
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
