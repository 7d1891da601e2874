"""Quality of one precision plan compared with another."""
