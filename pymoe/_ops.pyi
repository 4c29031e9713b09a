"""The operator library: importing it registers torch.ops.pymoe. It holds the facts of its build."""

torch: str
cuda: str
cuda_architectures: str
compiler: str
cpu_isa: str
