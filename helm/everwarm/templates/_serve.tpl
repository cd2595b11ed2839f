{{/* The args of `cluster:app`: the `app` block as it is, without empty entries. Unknown names are refused by
values.schema.json and, again, by the application itself. */}}
{{- define "everwarm.appArgs" -}}
{{- $args := dict -}}
{{- range $key, $value := .Values.app -}}
{{- if and (not (kindIs "invalid" $value)) (ne (toString $value) "") -}}{{- $_ := set $args $key $value -}}{{- end -}}
{{- end -}}
{{- if .Values.secrets.apiKeys.existingSecret -}}{{- $_ := set $args "api_key_file" "/etc/everwarm/secrets/api-keys" -}}{{- end -}}
{{- $_ := set $args "token_plane_ports" .Values.tokenPlane.ports -}}
{{- if include "everwarm.placed" . -}}
{{- $_ := set $args "router_resource" "everwarm_router" -}}
{{- $_ := set $args "replica_resource" "everwarm_replica" -}}
{{- end -}}
{{- toYaml $args -}}
{{- end -}}

{{/* Non-empty when some group is reserved for one role. Custom Ray resources then keep routers and replicas to
their groups: unlike node labels they exist in every KubeRay version and are understood by its autoscaler. */}}
{{- define "everwarm.placed" -}}
{{- range $group := include "everwarm.groups" . | fromYaml -}}
{{- if ne ($group.role | default "any") "any" -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{- define "everwarm.roleResources" -}}
{{- $resources := dict -}}
{{- if ne . "replica" -}}{{- $_ := set $resources "everwarm_router" 1000 -}}{{- end -}}
{{- if ne . "router" -}}{{- $_ := set $resources "everwarm_replica" 1000 -}}{{- end -}}
{{- toJson $resources -}}
{{- end -}}

{{- define "everwarm.logging" -}}
logging_config:
  encoding: JSON
  enable_access_log: {{ .Values.serve.accessLog }}
{{- end -}}

{{- define "everwarm.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: {{ .Values.serve.port }}
{{ include "everwarm.logging" . }}
applications:
  - name: everwarm
    route_prefix: /
    import_path: cluster:app
    args:
      {{- include "everwarm.appArgs" . | nindent 6 }}
    # The application turns Serve's access log off in its deployments, which outranks what is said for all of Serve.
    deployments:
      {{- range $name := list "Router" "Replica" }}
      - name: {{ $name }}
        {{- include "everwarm.logging" $ | nindent 8 }}
      {{- end }}
{{- end -}}
