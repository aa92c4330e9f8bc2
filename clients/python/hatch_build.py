"""Put what stands at the root of the repository into the distribution: hatchling looks only beside its pyproject.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGES = ("tmc_cli", "tmc_client", "tmc_common")


class Contents(BuildHookInterface[Any]):
    """Adds the packages: in a checkout from two folders up, in an unpacked source distribution from beside this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # it finds the packages by dev-mode-dirs
        here = Path(self.root)
        root = here if (here / _PACKAGES[0]).is_dir() else here.parents[1]
        include = build_data["force_include"]
        include[str(root / "protos")] = "tmc_common/protos" if self.target_name == "wheel" else "protos"
        if root != here:
            include.update({str(root / package): package for package in _PACKAGES})
