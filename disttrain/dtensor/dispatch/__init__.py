"""What happens when torch calls an operator on DTensors."""
