"""What shows and changes the cluster: snapshots, metrics, the operator's calls, traces, the page."""
