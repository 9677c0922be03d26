"""From recorded boots to a verdict: gates and their criteria, margins, floors. Nothing here boots or draws."""
