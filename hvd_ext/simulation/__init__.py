"""What happens on links and ranks, played with events: only messages and ports are known here, no plans."""
