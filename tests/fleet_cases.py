"""Fleet files that tests share."""

from pathlib import Path

from shardwright.cost.fleet import Fleet

LAB = """
name: lab
nodes:
  - {count: 2, devices: {type: V100-16GB, count: 8}, link: {bandwidth: 130 GB/s, latency: 5 us}}
  - {count: 6, devices: {type: P100-16GB, count: 8}, link: {bandwidth: 16 GB/s, latency: 10 us}}
network: {bandwidth: 10.4 Gbit/s, latency: 30 us}      # between nodes, per node
"""
SLOW_CPU = "{name: slow-cpu, flops: 20 GFLOP/s, memory_bandwidth: 8 GB/s, memory: 4 GB}"
JOINED = (
    LAB
    + """
oversubscription: 1.5
transport: nccl
"""
)


def load(tmp_path: Path, text: str | bytes) -> Fleet:
    path = tmp_path / "lab.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Fleet.load(path)


def solo(type_text: str) -> str:
    """A fleet of one device."""
    return f"name: solo\nnodes: [{{devices: {{type: {type_text}}}}}]"
