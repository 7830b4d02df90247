"""What pyproject.toml cannot say about the package: two roots, sources to compile, the README.

A wheel is pure: it holds the sources of the compiled operations, and their first use compiles them.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def long_description() -> str:
    """Return the README for a page elsewhere, or nothing in a tree without one.

    Links to files beside it become plain text, and pictures are left out with their captions.
    """
    readme = ROOT / "README.md"
    if not readme.exists():
        return ""
    picture = r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n*(?:\*[^*]+\*\n*)?"
    text = re.sub(picture, "", readme.read_text("utf-8"), flags=re.M)
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
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=packages,
    package_dir=package_dir,
    cmdclass={"build_py": BuildPackages},
    package_data={package: ["py.typed"] for package in package_dir},
)
