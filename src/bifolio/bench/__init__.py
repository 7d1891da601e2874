"""Speed measured against ceilings and peers, in one run on one machine."""
