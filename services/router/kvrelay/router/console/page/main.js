// Brings the parts together.

import * as chat from "./chat.js";
import { byId } from "./dom.js";
import { stored } from "./key.js";
import * as pods from "./pods.js";
import * as requests from "./requests.js";
import * as summary from "./summary.js";
import * as tiers from "./tiers.js";
import { watch } from "./watch.js";

const VIEWS = [summary, pods, tiers, requests, chat];

byId("change-key").hidden = stored() === null;
chat.start(requests.claim);
watch((state) => VIEWS.forEach((view) => view.show(state)));
