"""What a step did: traces, timelines, and bytes counted from outside the engine."""
