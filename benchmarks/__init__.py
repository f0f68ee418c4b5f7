"""Speed and memory, each figure by a command: paired, as ratios, the median of several runs, one JSON a figure."""
