// The tiers of each node's KV store.

import { byId, fill, list, make, say, share } from "./dom.js";
import { bytes, count, percent } from "./format.js";

const NAMES = { cpu: "CPU memory", file: "files", s3: "S3", peer: "other nodes" };

export function show({ stores }) {
  const rows = stores.flatMap((store) =>
    store.tiers.length ? store.tiers.map((tier) => ({ store, tier })) : [{ store, tier: null }],
  );
  byId("tiers-table").hidden = rows.length === 0;
  byId("no-tiers").hidden = rows.length > 0;
  list(byId("tiers"), rows, ({ store, tier }) => `${store.id} ${tier?.tier ?? ""}`, create, update);
}

function create({ store, tier }) {
  const name = make("th", "", store.id);
  name.scope = "row";
  return make(
    "tr",
    "",
    name,
    make("td", "", tier ? (NAMES[tier.tier] ?? tier.tier) : "–"),
    make("td", "", share()),
    make("td", "wide number"),
    make("td"),
    make("td", "wide number"),
    make("td", "wide number"),
    make("td", "", make("span")),
  );
}

function update(row, { store, tier }) {
  const [, , used, blocks, hits, read, written, state] = row.children;
  const held = tier?.limit_bytes ? `${bytes(tier.used_bytes)} of ${bytes(tier.limit_bytes)}` : "–";
  fill(used.firstElementChild, tier?.limit_bytes ? tier.used_bytes / tier.limit_bytes : null, held);
  say(blocks, tier ? count(tier.num_blocks) : "–");
  say(hits, tier ? percent(tier.hits, tier.hits + tier.misses) : "–");
  say(read, tier ? bytes(tier.bytes_read) : "–");
  say(written, tier ? bytes(tier.bytes_written) : "–");
  const [kind, text] = stateOf(store, tier);
  state.firstElementChild.className = `state ${kind}`;
  say(state.firstElementChild, text);
}

function stateOf(store, tier) {
  if (!store.answers) return ["bad", "does not answer"];
  if (tier && !tier.healthy) return ["bad", tier.reason || "failed"];
  return ["good", "ok"];
}
