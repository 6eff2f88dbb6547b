"""Hardware profiles whose numbers follow from a formula: H100 machines with fewer PCIe lanes to the host."""

from __future__ import annotations

from rllaunch.resolve.profiles import Profile, Value

# PCIe Gen5: 32e9 transfers of one bit a second and lane, 128 bits of data in every 130.
GEN5_LANE_BYTES_PER_SECOND = 32e9 * 128 / 130 / 8


def narrow_links() -> list[Profile]:
    return [_with_lanes(lanes) for lanes in (8, 4)]


def _with_lanes(lanes: int) -> Profile:
    place = "rllaunch_example/computed.py"
    source = f"example: PCIe Gen5, 3.94e9 bytes a second and lane, × {lanes} lanes; theory, not measured"
    return Profile(
        kind="hardware",
        name=f"example-H100-x{lanes}",
        plugin="example",
        place=place,
        description=f"Made up: the H100 node, {lanes} PCIe lanes a GPU",
        extends="H100",
        values={
            "hardware.host_link": Value(f"PCIe Gen5 x{lanes}", place, source),
            "hardware.host_link_bytes_per_second": Value(lanes * GEN5_LANE_BYTES_PER_SECOND, place, source),
        },
    )
