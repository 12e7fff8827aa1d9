"""What people bring in their first hour, as the smallest inputs that once failed, and their
neighbours.
"""
