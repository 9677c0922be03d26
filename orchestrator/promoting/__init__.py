"""What prod is and how it changes: candidate, canary, the move itself, the ledger of moves."""
