"""Builds the native CPU library beside its Python file; all else about the package is in pyproject.toml.

The library is no Python extension: its file has one name for every Python, a wheel is one for all of them, and a machine without a compiler
installs flatout without it (kernels/native/__init__.py then says what that costs).
"""

from __future__ import annotations

import warnings
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/flatout/kernels/native")
FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno"),  # a row's bits may not depend on how the compiler fused its sums
    "-Wno-maybe-uninitialized",  # GCC's own headers of AVX-512 set it off
]


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except Exception as error:
            warnings.warn(f"flatout installs without its native CPU kernels, and is several times slower on a CPU: {error}", stacklevel=1)
            raise  # setuptools goes on, as the extension is optional


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "flatout.kernels.native.libflatout",
            sources=sorted(str(p) for p in FOLDER.glob("*.cpp")),
            depends=sorted(str(p) for p in (*FOLDER.glob("*.h"), *FOLDER.glob("*.inc"))),
            language="c++",
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
)
