"""Reinforcement learning: small networks, many updates

    torchrun --nproc-per-node 2 examples/reinforcement.py

REINFORCE on a walk to the right: each rank plays its own episodes, and the update averages over all. Networks this
small need no stage 3: stage 1 keeps parameters whole, so acting costs no communication, and ranks may play episodes of
different lengths between two updates.
"""

import torch
from torch import Tensor, nn

import zeroshard as zs

GOAL, LONGEST = 6, 30


def play(policy: nn.Module, device: torch.device) -> tuple[Tensor, float]:
    """Play one episode; return the sum of log-probabilities of the actions, and the reward."""
    place, log_probability = 0, torch.zeros((), device=device)
    for moment in range(LONGEST):
        observed = torch.tensor([place / GOAL, moment / LONGEST], device=device)
        choice = torch.distributions.Bernoulli(logits=policy(observed)[0])
        action = choice.sample()
        log_probability = log_probability + choice.log_prob(action)
        place = max(place + (1 if action else -1), -GOAL)
        if place == GOAL:
            return log_probability, 1.0 - moment / LONGEST
    return log_probability, 0.0


def main(updates: int = 60, episodes: int = 4) -> tuple[float, float]:
    """Train; return the mean reward of the first and of the last ten updates, over all ranks."""
    mesh = zs.init(seed=0)  # each rank draws its own actions
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(mesh.device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    zs.shard(policy, optimizer, stage=1)
    rewards = []
    baseline = 0.0
    for _ in range(updates):
        played = [play(policy, mesh.device) for _ in range(episodes)]
        reward = sum(one for _, one in played) / episodes
        loss = -sum(log_probability * (one - baseline) for log_probability, one in played) / episodes
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(zs.mean_across_ranks(torch.tensor(reward)).item())
        baseline = 0.9 * baseline + 0.1 * rewards[-1]
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    if mesh.rank == 0:
        print(f"mean reward {first:.2f} in the first ten updates, {last:.2f} in the last ten")
    return first, last


if __name__ == "__main__":
    main()
