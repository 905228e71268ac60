"""Workers: the nodes of the graph, one file each."""
