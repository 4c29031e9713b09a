"""Expert parallelism: the experts of a layer spread over the ranks of a process group."""
