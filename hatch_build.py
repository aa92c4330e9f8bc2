"""The center needs the SDK of exactly its version: both come from one commit, and share `tmc_common`."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SameVersion(MetadataHookInterface):
    """Write the dependency on tmc-client."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"tmc-client=={metadata['version']}"]
