"""The operator library: importing it registers torch.ops.pymoe. It says how it was built, and its instruction set."""

torch: str
cuda: str
cuda_architectures: str
compiler: str
cpu_isa: str
